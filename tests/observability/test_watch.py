"""The view in a terminal: what it says at every size, and that a model's text does not steer the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time

import pytest
from rich.console import Console
from rich.text import Text

from fivefold.cli import main
from fivefold.observability.run_logger import append_json
from fivefold.observability.run_view import RunView
from fivefold.observability.watch import frame, plain


@pytest.fixture
def run(tmp_path):
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "steps": 40}))
    (tmp_path / "trace").mkdir()
    for step in range(1, 31):
        row = {"step": step, "reward/mean": step / 40, "policy/entropy": 1 / step, "policy/kl_reference": 0.0,
               "time/step": 2.0, "time/train": 1.5, "time/rollout": 0.5, "wall": time.time() - 60 + 2 * step}  # fmt: skip
        append_json(tmp_path / "metrics.jsonl", row)
    append_json(
        tmp_path / "samples.jsonl",
        {"step": 30, "kind": "train", "prompt": "1+1=", "response": "2\x1b[2J\n\nyes", "reward": 1},
    )
    return tmp_path


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("runs", [1, 3])
def test_a_frame_fits_the_terminal_and_says_what_happens(run, width, runs):
    for height in (24, None):
        written = io.StringIO()
        console = Console(file=written, width=width, force_terminal=True, color_system="truecolor", highlight=False)
        console.print(frame([RunView(run)] * runs, width, height))
        lines = [Text.from_ansi(line).plain for line in written.getvalue().split("\n")]
        assert max(map(len, lines)) <= width
        assert height is None or len(lines) <= height + 1 or runs > 1
        assert "\x1b[2J" not in written.getvalue()
        text = "\n".join(lines)
        assert "running" in text and "step 30 of 40" in text
        if height is None:
            assert "train  75%" in text and "2�[2J yes" in text
            assert all(
                f"{name}{' ' if runs == 1 else ' ■ '}{value}" in text
                for name, value in (("reward", 0.75), ("entropy", 0.0333))
            )


def shown(*runs, width=120):
    written = io.StringIO()
    Console(file=written, width=width).print(frame([RunView(run) for run in runs], width))
    return written.getvalue()


def test_a_sample_shows_the_question_and_its_difference_to_its_group(run):
    row = {"step": 31, "kind": "train", "prompt": "<|im_start|>system\nBe brief.", "question": "2+2=", "response": "4"}
    for sample, reward, group in ((0, 1.0, [1.0, 0.0, None, 0.0]), (1, 0.0, None)):
        numbers = {"group_rewards": group, "group_lengths": [1, 2, 3, 4]} if group else {}
        append_json(run / "samples.jsonl", {**row, "sample": sample, "reward": reward, "response_tokens": 3, **numbers})
    append_json(run / "samples.jsonl", {**row, "reward": 0.5, "group_rewards": [0.5] * 8})
    text = shown(run)
    assert "step 31 train reward 1 (+0.667 to its group), 3 tokens  2+2=" in text and "im_start" not in text
    assert "step 31 train reward 0.5 (all 8 equal)  2+2=" in text
    assert "step 31 train reward 0" not in text.replace("reward 0.5", ""), "one row for each group"


def test_the_axis_of_a_curve_is_named(run):
    assert "     step 1    " in shown(run)


def test_runs_are_told_apart_without_colors_and_take_turns_among_samples(run):
    text = shown(run, run)
    assert "■ step 30" in text and "● step 30" in text and "entropy ■ 0.0333 ● 0.0333" in text


def test_without_a_terminal_one_frame_is_printed(run, capsys):
    assert main(["watch", str(run)]) == 0
    assert "step 30 of 40" in capsys.readouterr().out


def test_a_directory_without_metrics_yet_and_one_that_is_none(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 0
    assert "no metrics yet" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "must be the directory of a run" in capsys.readouterr().err


def test_in_a_terminal_it_follows_the_run_to_its_end(run):
    """Through a pseudo-terminal, as a person sees it; the process knows no torch."""
    mine, theirs = pty.openpty()
    script = "import sys; from fivefold.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    watching = subprocess.Popen(
        [sys.executable, "-c", script, "watch", str(run), "--every", "0.2"], stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while b"step 30 of 40" not in seen:
        seen += os.read(mine, 65536)
    append_json(run / "metrics.jsonl", {"step": 31, "reward/mean": 0.5, "wall": time.time()})
    while b"step 31 of 40" not in seen:
        seen += os.read(mine, 65536)
    (run / "status.json").write_text(json.dumps({"state": "finished", "steps": 40}))
    try:
        while chunk := os.read(mine, 65536):
            seen += chunk
    except OSError:
        pass
    assert watching.wait(10) == 0 and b"finished" in seen and b"\x1b[?1049h" in seen


def test_what_would_steer_a_terminal_is_replaced():
    assert plain("a\x1b]0;title\x07b\u202e\n c") == "a�]0;title�b� c"
