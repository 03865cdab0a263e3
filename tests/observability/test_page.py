"""The report in a real browser: drawn, live, zoomed, filtered, readable at every width, and never markup from a model."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from pathlib import Path

import pytest
import yaml

from fivefold.observability.report import write_report
from fivefold.observability.run_logger import append_json
from fivefold.observability.serve import ReportServer
from tests.support.browser import CHROMIUM, browser

pytestmark = [
    pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: name one in CHROMIUM")
]  # fmt: skip
EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
CHECKS = (Path(__file__).parent / "page_checks.js").read_text()
TYPED = "(input => {{ input.value = {value!r}; for (const kind of ['input', 'change']) input.dispatchEvent(new Event(kind)); }})(document.getElementById({id!r}))"
POINTS = "document.querySelector('figure.chart polyline').getAttribute('points').split(' ').length"
TITLES = "[...document.querySelectorAll('#charts figcaption')].map(c => c.textContent)"


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
        (run / "run.yaml").write_text(f"note: {EVIL!r}\ntrainer: {{steps: 20}}\n{EVIL!r}: {len(name)}\n")
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


def full_run(run, place=0, steps=40):
    """A run with everything that a page shows: groups, long texts, cut responses, evaluations, stages, requests."""
    draw = random.Random(place)
    (run / "trace").mkdir(parents=True)
    config = {
        "algorithm": {"updates_per_step": 1, "ppo_epochs": 1, "kl": {"coef": 0.001 * place}},
        "policy": {"optimizer": {"lr": 10.0**-place, "schedule": "constant", "warmup_steps": 0}},
        "engine": {"backend": "vllm:d1"}, "model": {"path": "Qwen/Qwen3-30B-A3B-Instruct-" * (1 + place % 2)},
    }  # fmt: skip
    (run / "run.yaml").write_text(yaml.safe_dump(config))
    (run / "status.json").write_text(json.dumps({"state": "failed" if place else "running", "steps": 2 * steps}))
    (run / "logs").mkdir()
    (run / "logs/rank-0.error").write_text("torch.OutOfMemoryError: " + "CUDA-out-of-memory" * 8)
    for step in range(steps + 1):
        share = 1 / (1 + math.exp(-(step - steps / 2) / 6))
        row = {"step": step, "wall": 1.76e9 + (30 + place) * step + draw.random(), "time/step": 30.0, "time/train": 9.0,
               "time/rollout": 20.0, "time/weight_sync": 0.01}  # fmt: skip
        if step:
            row |= {"reward/mean": share, "reward/std": 0.5 - share / 3, "policy/loss": draw.gauss(0, 1e-4), "policy/lr": 1e-6,
                    "policy/ratio_mean": 1.0, "policy/clip_fraction": 0.0, "policy/entropy": 1 / step, "policy/kl_old": 0.0,
                    "reward/pass@8": 0.9, "reward/mean@8": share, "reward/solve_all": share / 2, "reward/solve_none": 0.1,
                    "response/length_mean": 4000 + step, "response/length_max": 32768, "policy/grad_norm": 1e7 * draw.random(),
                    "memory/peak_gb": 61.25, "throughput/tokens_per_second": 123456.7}  # fmt: skip
        if step % 10 == 0:
            row |= {
                f"val/{source}/accuracy": share for source in ("gsm8k", "math-500", "a-source-with-a-very-long-name-2026")
            }
        append_json(run / "metrics.jsonl", row)
        for group in range(3):
            rewards = (
                [None if draw.random() < 0.05 else float(draw.random() < share) for _ in range(8)] if group else [0.0] * 8
            )
            question = f"What is {group} + {step % 4}? " + "Explain every step of the calculation. " * (30 * group)
            text = "Let us think step by step. " * (5 + 100 * (group == 1)) + f"\\boxed{{{group}}}"
            append_json(run / "samples.jsonl", {
                "step": step, "kind": "train", "group": group, "source": "gsm8k", "prompt_id": group, "question": question,
                "prompt": f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n",
                "response": text, "ground_truth": "7", "reward": rewards[0], "reward_parts": {"gsm8k": rewards[0]},
                "response_tokens": 100 * group, "finished": group != 1, "group_rewards": rewards,
                "group_lengths": [100 * group + 20 * number for number in range(8)],
            })  # fmt: skip
    spans = [{"name": name, "start": start + 30.0 * step, "seconds": seconds} for step in range(6)
             for name, start, seconds in (("step", 0, 30), ("rollout", 0, 20), ("train", 20, 9), ("eval", 29, 1))]  # fmt: skip
    warning = "all 8 samples of every group had the same reward: no gradient; raise data.max_response_tokens"
    append_json(run / "warnings.jsonl", {"step": steps, "rule": "equal_rewards", "text": warning})
    curve = [[float(second), second % 50] for second in range(0, 180, 3)]
    append_json(run / "trace/stages.jsonl", {"step": steps, "spans": spans, "curves": {"requests in flight": curve}})
    return run


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Number of runs -> the page of so many."""
    root = tmp_path_factory.mktemp("full")
    directories = [
        full_run(root / (f"run-{place}" if place else "qwen3-30b-a3b-lr1e-6-kl-0.001-a-long-name"), place)
        for place in range(9)
    ]
    return {amount: write_report(directories[:amount]).rename(root / f"{amount}.html").as_uri() for amount in (1, 3, 9)}


def test_a_page_of_two_runs_is_live_zoomed_and_filtered_and_runs_no_text_of_a_model(tmp_path, runs, server):
    with browser(tmp_path / "profile") as page:
        page.open(server.url)
        # Two runs over each other, in every chart that has numbers.
        assert page.ask(TITLES)[:2] == ["Reward", "Entropy"]
        assert page.ask("document.querySelectorAll('figure.chart')[0].querySelectorAll('polyline').length") == 2
        assert page.ask("document.querySelector('.run dd').textContent") == "10 of 20"
        # What comes while it is open is drawn, and a chart in focus stays in focus.
        page.ask("document.querySelectorAll('figure.chart > svg')[1].focus()")
        write(runs[0], 11, 12)
        page.wait("document.querySelector('.run dd').textContent === '12 of 20'")
        assert page.ask(POINTS) == 12
        assert page.ask("document.activeElement.closest('figure').querySelector('figcaption').textContent") == "Entropy"
        # The pointer shows the values of its step; a drag shows the steps between, a button all again.
        page.drag("figure.chart svg", 0.5, 0.5)
        assert page.ask("document.querySelector('.tip').textContent").startswith("step 6")
        page.drag("figure.chart svg", 0.3, 0.6)
        assert page.ask(POINTS) < 8
        assert page.ask("document.getElementById('whole').hidden") is False
        page.ask("document.getElementById('whole').click()")
        assert page.ask(POINTS) == 12
        # Samples by text, step, kind and reward.
        count = "document.querySelectorAll('.sample tbody tr').length"
        assert page.ask(count) == 22
        for name, value, left in (
            ("steps", "10-12", 4),
            ("search", "12+", 1),
            ("search", "", 4),
            ("kind", "val", 2),
            ("reward", "above", 0),
        ):
            page.ask(TYPED.format(id=name, value=value))
            assert page.ask(count) == left, (name, value)
        page.ask(TYPED.format(id="metric", value="ENTR"))
        assert page.ask(TITLES) == ["policy/entropy"]
        # A run that is hidden leaves every chart.
        page.ask("document.querySelectorAll('.run button')[1].click()")
        assert page.ask("document.querySelectorAll('figure.chart polyline').length") == 1
        assert page.ask("document.title").endswith("- Fivefold") and page.ask("document.images.length") == 0
        assert page.ask("document.scripts.length") == 2 and page.errors == []


def test_a_sample_that_is_being_read_stays_as_it_is_while_the_run_continues(tmp_path, server, runs):
    with browser(tmp_path / "profile") as page:
        page.open(server.url)
        page.ask(
            "document.querySelector('.sample').append(Object.assign(document.createElement('button'), {id: 'reading'}))"
        )
        page.ask("document.getElementById('reading').focus()")
        write(runs[0], 11)
        page.wait("document.querySelector('.run dd').textContent === '11 of 20'")
        assert page.ask("document.activeElement.id") == "reading"


def test_a_report_in_a_file_shows_the_same_without_a_server(tmp_path, runs):
    out = write_report(runs)
    with browser(tmp_path / "profile") as page:
        page.open(out.as_uri(), width=420)
        assert page.ask("document.querySelectorAll('figure.chart')[0].querySelectorAll('polyline').length") == 2
        assert page.ask("document.querySelector('.sample .question').textContent") == "10+1="
        assert page.ask("document.querySelector('.sample td.response').textContent") == EVIL
        assert page.ask("document.documentElement.scrollWidth") <= 420
        assert page.ask("document.title").endswith("- Fivefold") and page.errors == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("amount", [1, 3, 9])
def test_a_page_is_readable_at_every_width_and_in_both_color_schemes(tmp_path, full, width, scheme, amount):
    with browser(tmp_path / "profile") as page:
        page.prefer(scheme)
        page.open(full[amount], width=width)
        page.ask("document.querySelectorAll('details:not(.config details)').forEach(each => each.open = true)")
        page.ask(CHECKS)
        for check in ("cut", "contrast", "lines", "legends", "size", "overlap", "broken", "names"):
            assert page.ask(f"checks.{check}()") == [], check
        page.ask("document.querySelector('input[value=time]').click()")
        page.ask(TYPED.format(id="smooth", value="0.6"))
        for check in ("cut", "legends", "overlap"):
            assert page.ask(f"checks.{check}()") == [], f"{check}, over time"
        assert page.errors == []


def test_every_control_is_reached_with_the_keyboard(tmp_path, full):
    with browser(tmp_path / "profile") as page:
        page.open(full[3])
        page.ask(CHECKS)
        wanted = page.ask("checks.controls()")
        page.ask("window.reached = new Set()")
        for _ in range(wanted + 3):
            page.press("Tab")
            page.ask("void reached.add(document.activeElement)")
        assert page.ask("reached.delete(document.body), reached.size") >= wanted > 40
        assert page.ask("[...document.querySelectorAll('#charts .chart')].every(c => reached.has(c.querySelector('svg')))")
        # A chart says its values, a run is hidden, the axis switched and the range chosen without a mouse.
        page.ask("document.querySelector('figure.chart svg').focus()")
        page.press("ArrowRight")
        page.press("ArrowRight")
        assert page.ask("document.querySelector('.tip:not([hidden])').textContent").startswith("step 2")
        page.press("Escape")
        assert page.ask("document.querySelector('.tip:not([hidden])')") is None
        page.ask("document.querySelector('.run button').focus()")
        page.press("Enter")
        assert page.ask("document.activeElement.getAttribute('aria-pressed')") == "false"
        page.ask("document.querySelector('input[value=step]').focus()")
        page.press("ArrowRight")
        assert page.ask("document.querySelector('#charts .axis').textContent") == "minutes since the start"


def test_the_axis_is_named_and_shows_steps_or_the_time_since_the_start(tmp_path, full):
    ticks = "[...document.querySelectorAll('figure.chart')[0].querySelectorAll('text[text-anchor=middle]')].map(t => t.textContent)"
    with browser(tmp_path / "profile") as page:
        page.open(full[3])
        assert page.ask(ticks)[-2:] == ["40", "step"]
        page.ask("document.querySelector('input[value=time]').click()")
        assert page.ask(ticks)[-1] == "minutes since the start" and 15 <= float(page.ask(ticks)[-2]) <= 22
        # A step of the third run takes two seconds more: its last one is the farthest to the right.
        ends = page.ask(
            "[...document.querySelector('figure.chart').querySelectorAll('polyline')].map(p => p.points[p.points.length - 1].x)"
        )
        assert ends[0] < ends[1] < ends[2]
        page.ask(TYPED.format(id="range", value="5 - 10"))
        assert 5 <= page.ask(POINTS) <= 12 and page.ask("document.getElementById('range-unit').textContent") == "Minutes"
        page.ask("document.querySelector('input[value=step]').click()")
        assert page.ask(POINTS) == 40
        page.ask(TYPED.format(id="range", value="11-20"))
        assert page.ask(POINTS) == 10


def test_samples_are_grouped_by_prompt_with_the_difference_to_their_group(tmp_path, full):
    card = "[...document.querySelectorAll('.sample')].find(c => c.querySelector('.question').textContent.includes({text!r}))"
    with browser(tmp_path / "profile") as page:
        page.open(full[1])
        rows = [
            json.loads(line)
            for line in (Path(full[1][7:]).parent / "qwen3-30b-a3b-lr1e-6-kl-0.001-a-long-name/samples.jsonl")
            .read_text()
            .splitlines()
        ]
        row = next(
            row
            for row in rows
            if row["group"] == 2 and set(row["group_rewards"]) == {None, 0.0, 1.0} and row["reward"] is not None
        )
        page.ask(TYPED.format(id="steps", value=str(row["step"])))
        assert page.ask("document.querySelectorAll('.sample').length") == 3
        rewards = [reward for reward in row["group_rewards"] if reward is not None]
        text = page.ask(card.format(text="What is 2") + ".querySelector('td.against').textContent")
        assert f"mean {sum(rewards) / len(rewards):.3g} of {len(rewards)}" in text
        assert page.ask(card.format(text="What is 2") + ".querySelector('td.tokens').textContent") == "200(−70)"
        assert page.ask(card.format(text="What is 0") + ".querySelector('td.against').textContent") == "all 8 equal"
        assert page.ask(card.format(text="What is 1") + ".querySelector('td.tokens').textContent").endswith("cut off")
        # The question is shown, the template on request; a long response keeps its end, and shows all of it on request.
        assert page.ask(card.format(text="What is 0") + ".querySelector('.question').textContent").startswith(
            f"What is 0 + {row['step'] % 4}?"
        )
        assert "<|im_start|>system" in page.ask(card.format(text="What is 0") + ".querySelector('details pre').textContent")
        response = card.format(text="What is 1") + ".querySelector('td.response')"
        assert page.ask(f"{response}.textContent").endswith("\\boxed{1}Show all")
        page.ask(f"{response}.querySelector('button').click()")
        assert page.ask(f"{response}.querySelector('pre').textContent") == next(
            row["response"] for row in rows if row["group"] == 1
        )
        # The same prompt of all steps is one card.
        page.ask(TYPED.format(id="steps", value=""))
        page.ask(TYPED.format(id="search", value="What is 0 + 1?"))
        assert page.ask("document.getElementById('count').textContent") == "10 samples of 1 prompt"


def test_charts_that_are_constant_by_construction_are_folded_with_the_reason(tmp_path, full):
    with browser(tmp_path / "profile") as page:
        page.open(full[3])
        folded = page.ask("[...document.querySelectorAll('#folded summary')].map(s => s.textContent)")
        assert folded[0].startswith("Ratio, Clipped tokens, KL from the policy before the step: each step has one update")
        assert folded[1] == "Learning rate: policy.optimizer.schedule is constant and has no warm-up"
        assert not {"Ratio", "Learning rate"} & set(
            page.ask(TITLES)
        ) and "Truncated and repetitive responses" not in page.ask(TITLES)
        page.ask("document.querySelector('#folded details').open = true")
        assert page.ask("document.querySelectorAll('#folded details[open] polyline').length") == 9


def test_warnings_stand_with_their_run_at_the_top_of_the_page(tmp_path, full):
    with browser(tmp_path / "profile") as page:
        page.open(full[3])
        warnings = page.ask("[...document.querySelectorAll('#runs .run')].map(r => r.querySelector('.warning').textContent)")
        assert len(warnings) == 3 and all(
            text.startswith("all 8 samples of every group had the same reward") for text in warnings
        )


def test_keys_that_differ_between_runs_are_a_table(tmp_path, full):
    with browser(tmp_path / "profile") as page:
        page.open(full[3])
        cells = "[...document.querySelectorAll('#differences tr')].map(r => [...r.cells].map(c => c.textContent))"
        head, *rows = page.ask(cells)
        assert head[2:] == ["run-1", "run-2"]
        assert ["algorithm.kl.coef", "0.0", "0.001", "0.002"] in rows and len(rows) == 3
        page.open(full[1])
        assert page.ask("document.getElementById('compare').hidden") is True


def test_histograms_show_rewards_and_lengths_of_the_first_and_last_steps(tmp_path, full):
    titles = "[...document.querySelectorAll('#histograms figcaption')].map(c => c.textContent)"
    keys = "[...document.querySelectorAll('#histograms figure')].map(f => [...f.querySelectorAll('.legend li')].map(l => l.textContent))"
    with browser(tmp_path / "profile") as page:
        page.open(full[1])
        assert page.ask(titles) == ["Rewards of samples", "Lengths of responses"]
        (_, lengths) = page.ask(keys)
        # 41 steps of three groups of eight: a fourth of the stretches at each end.
        assert lengths == ["steps 0 to 11288 samples", "steps 30 to 40264 samples"]
        page.ask(TYPED.format(id="range", value="0-5"))
        assert all("steps 0 to" in line or "to 5" in line for line in page.ask(keys)[0])
        page.open(full[3])
        assert len(page.ask(keys)[0]) == 3


def test_the_raw_data_can_be_saved_from_a_file_and_from_a_served_page(tmp_path, full, server, runs):
    saved = tmp_path / "saved"
    with browser(tmp_path / "profile") as page:
        page.save_to(saved)

        def save(place):
            page.ask(f"document.querySelectorAll('#files button, #files a')[{place}].click()")
            for _ in range(200):
                files = [path for path in saved.glob("*") if path.suffix != ".crdownload"] if saved.is_dir() else []
                if files:
                    content = files[0].read_text()
                    files[0].unlink()
                    return files[0].name, content
                time.sleep(0.05)
            raise AssertionError("nothing was saved")

        page.open(full[1])
        run = Path(full[1][7:]).parent / "qwen3-30b-a3b-lr1e-6-kl-0.001-a-long-name"
        for place, name in enumerate(("metrics.jsonl", "samples.jsonl")):
            file_name, content = save(place)
            assert file_name == f"{run.name}-{name}"
            assert [json.loads(line) for line in content.splitlines()] == [
                json.loads(line) for line in (run / name).read_text().splitlines()
            ]
        assert save(2)[1] == (run / "run.yaml").read_text()
        page.open(server.url)
        assert save(0) == ("first-metrics.jsonl", (runs[0] / "metrics.jsonl").read_text())
        assert page.errors == []


def test_a_page_of_a_thinned_run_says_that_it_has_a_part_and_keeps_its_time_axis(tmp_path):
    run = tmp_path / "long"
    run.mkdir()
    draw = random.Random(1)
    names = ["reward/mean", *(f"reward/part-{number}" for number in range(40))]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 6001):
            file.write(
                json.dumps(
                    {"step": step, "wall": 1.76e9 + 10 * step, "time/step": 10.0, **{name: draw.random() for name in names}}
                )
                + "\n"
            )
    out = write_report([run])
    assert out.stat().st_size < 5 * 10**6
    with browser(tmp_path / "profile") as page:
        page.open(out.as_uri())
        assert "has a part of the rows" in page.ask("document.getElementById('part').textContent")
        page.ask("document.querySelector('input[value=time]').click()")
        x = page.ask("[...document.querySelector('figure.chart polyline').points].map(p => p.x)")
        assert x == sorted(x) and x[-1] - x[0] > 300
        page.ask("document.querySelector('input[value=step]').click()")
        again = page.ask("[...document.querySelector('figure.chart polyline').points].map(p => p.x)")
        assert x == pytest.approx(again, abs=0.3), "every step took the same time"


def trajectory(step: int, text: str) -> dict:
    """A row of transcripts.jsonl: two turns with an observation between them, and a second sequence."""
    turn = {"reward": 0.0, "state": None, "finish": "stop", "seconds": 0.5, "text": text, "calls": []}
    first = {
        "row": 0, "break": None, "context": [1, 2], "context_text": text, "tokens": [3, 4, 5], "texts": [text, "seen", "c"],
        "mask": [True, False, True], "logprobs": [-0.01, None, -5.0], "advantages": [0.5, 0.0, -0.5],
        "turns": [turn | {"number": 0, "begin": 0, "end": 1}, turn | {"number": 1, "begin": 2, "end": 3, "reward": 1.0}],
    }  # fmt: skip
    later = {
        **first, "break": {"cause": "template", "at": 4, "held": text, "now": "x"}, "tokens": [3], "texts": ["d"], "mask": [True],
        "logprobs": [-0.5], "advantages": None, "turns": [turn | {"number": 2, "begin": 0, "end": 1}],
    }  # fmt: skip
    head = {"step": step, "kind": "train", "group": 0, "source": text, "prompt_id": 1, "wall": 1.0, "trajectory": 0}
    return head | {"reward": 1.0, "reward_parts": {}, "failed": False, "end": "done", "sequences": [first, later]}


def test_transcripts_show_turns_folded_with_colored_tokens_and_breaks(tmp_path, runs):
    out = write_report(runs)
    with browser(tmp_path / "profile") as page:
        page.open(out.as_uri())
        assert page.ask("document.getElementById('transcripts').hidden"), "no run has several turns"
    append_json(runs[0] / "transcripts.jsonl", trajectory(3, EVIL))
    out = write_report(runs)
    with browser(tmp_path / "other") as page:
        page.open(out.as_uri(), width=420)
        assert not page.ask("document.getElementById('transcripts').hidden")
        assert page.ask("document.querySelectorAll('.trajectory .turn').length") == 2 + 3 + 1
        assert page.ask("document.querySelectorAll('.trajectory details[open]').length") == 0
        page.ask("document.querySelectorAll('.trajectory details').forEach(each => each.open = true)")
        shades = page.ask("[...document.querySelectorAll('.trajectory .sampled')].map(each => each.className)")
        assert shades == ["sampled up", "sampled p3 down", "sampled p1"]
        assert page.ask("document.querySelector('.trajectory .sampled').textContent") == EVIL
        assert page.ask("document.querySelector('.trajectory span.observed').textContent") == "seen"
        broken = page.ask("document.querySelector('.trajectory .warning').textContent")
        assert broken.startswith('A new sequence begins (template): token 4 is "x" where ')
        assert page.ask("document.documentElement.scrollWidth") <= 420
        assert page.ask("document.title").endswith("- Fivefold") and page.errors == []
