"""The warnings of a run stand on top of its report, in a real browser."""

from __future__ import annotations

import pytest

from fivefold.observability.report import write_report
from fivefold.observability.run_logger import append_json
from fivefold.observability.warnings import WARNINGS
from tests.support.browser import CHROMIUM, browser

pytestmark = [
    pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: name one in CHROMIUM")
]  # fmt: skip


def test_the_latest_warnings_are_on_top_of_the_report_as_plain_text(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    evil = "no greedy responses to <img src=x onerror=\"document.title = 'taken'\"> were correct"
    for step in (1, 2):
        append_json(run / "metrics.jsonl", {"step": step, "reward/mean": 0.0, "wall": 100.0 + step})
    append_json(run / WARNINGS, {"step": 1, "rule": "kl", "text": "an older one"})
    append_json(run / WARNINGS, {"step": 2, "rule": "evaluation", "text": evil})
    with browser(tmp_path / "profile") as page:
        page.open(write_report([run]).as_uri())
        assert page.ask("[...document.querySelectorAll('#runs .warning')].map(w => w.textContent)") == [evil]
        above = "document.querySelector('.warning').getBoundingClientRect().bottom"
        assert page.ask(f"{above} < document.getElementById('curves').getBoundingClientRect().top")
        assert page.ask("document.title") != "taken"
