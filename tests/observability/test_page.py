"""The report in a real browser: drawn, live, zoomed, filtered, and never markup from a model."""

from __future__ import annotations

import json
import threading

import pytest

from fivefold.observability.report import write_report
from fivefold.observability.run_logger import append_json
from fivefold.observability.serve import ReportServer
from tests.support.browser import CHROMIUM, browser

pytestmark = [
    pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: name one in CHROMIUM")
]  # fmt: skip
EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


def write(run_dir, *steps):
    for step in steps:
        append_json(run_dir / "metrics.jsonl", {"step": step, "reward/mean": step / 20, "policy/entropy": 1 / step, EVIL: 1.0,
                                                "time/train": 1.0, "time/step": 1.0, "wall": 100.0 + step})  # fmt: skip
        append_json(run_dir / "samples.jsonl", {"step": step, "kind": "val" if step % 5 == 0 else "train", "prompt": f"{step}+1=",
                                                "response": EVIL, "ground_truth": EVIL, "reward": step % 2, EVIL: EVIL})  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    for name in ("first", EVIL.replace("/", "|")):
        run = tmp_path / "runs" / name
        (run / "trace").mkdir(parents=True)
        write(run, *range(1, 11))
        (run / "run.yaml").write_text(f"note: {EVIL!r}\ntrainer: {{steps: 20}}\n")
        (run / "status.json").write_text(json.dumps({"state": "running", "steps": 20}))
        spans = [{"name": EVIL, "start": 0.0, "seconds": 1.0}, {"name": "step", "start": 0.0, "seconds": 2.0}]
        append_json(run / "trace/stages.jsonl", {"step": 10, "spans": spans})
        (run / "logs").mkdir()
        (run / "logs/rank-0.error").write_text(EVIL)
    return sorted((tmp_path / "runs").iterdir(), key=lambda path: path.name != "first")


@pytest.fixture
def server(runs):
    with ReportServer(runs, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_a_page_of_two_runs_is_live_zoomed_and_filtered_and_runs_no_text_of_a_model(tmp_path, runs, server):
    with browser(tmp_path / "profile") as page:
        page.open(server.url)
        # Two runs over each other, in every chart that has numbers.
        assert page.ask("[...document.querySelectorAll('figcaption')].map(c => c.textContent).slice(0, 2)") == [
            "Reward",
            "Entropy",
        ]
        assert page.ask("document.querySelectorAll('figure.chart')[0].querySelectorAll('polyline').length") == 2
        assert page.ask("document.querySelector('.run em').textContent") == "10 of 20"
        # What comes while it is open is drawn without being asked for.
        write(runs[0], 11, 12)
        page.wait("document.querySelector('.run em').textContent === '12 of 20'")
        assert (
            page.ask(
                "document.querySelectorAll('figure.chart')[0].querySelector('polyline').getAttribute('points').split(' ').length"
            )
            == 12
        )
        # The pointer shows the values of its step; a drag shows the steps between, a button all again.
        page.drag("figure.chart svg", 0.5, 0.5)
        assert page.ask("document.querySelector('.tip').textContent").startswith("step 6")
        page.drag("figure.chart svg", 0.3, 0.6)
        assert page.ask("document.querySelector('figure.chart polyline').getAttribute('points').split(' ').length") < 8
        assert page.ask("document.getElementById('whole').hidden") is False
        page.ask("document.getElementById('whole').click()")
        assert page.ask("document.querySelector('figure.chart polyline').getAttribute('points').split(' ').length") == 12
        # Samples by text, step, kind and reward.
        count = "document.querySelectorAll('table.samples tr').length - 1"
        assert page.ask(count) == 22
        typed = "(input => {{ input.value = {value!r}; input.dispatchEvent(new Event('input')); }})(document.getElementById({id!r}))"
        for name, value, left in (
            ("steps", "10-12", 4),
            ("search", "12+", 1),
            ("search", "", 4),
            ("kind", "val", 2),
            ("reward", "above", 0),
        ):
            page.ask(typed.format(id=name, value=value))
            assert page.ask(count) == left, (name, value)
        page.ask(typed.format(id="metric", value="ENTR"))
        assert page.ask("[...document.querySelectorAll('figure.chart figcaption')].map(c => c.textContent)") == [
            "policy/entropy"
        ]
        # A run that is hidden leaves every chart.
        page.ask("document.querySelectorAll('.run .top')[1].click()")
        assert page.ask("document.querySelectorAll('figure.chart polyline').length") == 1
        assert page.ask("document.title").endswith("- Fivefold") and page.ask("document.images.length") == 0
        assert page.ask("document.scripts.length") == 2 and page.errors == []


def test_a_report_in_a_file_shows_the_same_without_a_server(tmp_path, runs):
    out = write_report(runs)
    with browser(tmp_path / "profile") as page:
        page.open(out.as_uri(), width=420)
        assert page.ask("document.querySelectorAll('figure.chart')[0].querySelectorAll('polyline').length") == 2
        assert page.ask("document.querySelector('.samples pre').textContent") == "10+1="
        assert page.ask("document.querySelectorAll('.samples pre')[1].textContent") == EVIL
        assert page.ask("document.documentElement.scrollWidth") <= 420
        assert page.ask("document.title").endswith("- Fivefold") and page.errors == []
