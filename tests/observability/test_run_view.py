"""A run directory while it is written: state, time left, and rows that a resumed run takes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from fivefold.checkpoint.checkpoints import Checkpoints
from fivefold.launch.lock import locked
from fivefold.observability.run_logger import RunLogger, append_json
from fivefold.observability.run_view import RunView
from fivefold.observability.warnings import WARNINGS


def write(run_dir, *steps, value=1.0):
    for step in steps:
        append_json(run_dir / "metrics.jsonl", {"step": step, "reward/mean": value, "wall": 1000.0 + 2 * step})
        append_json(run_dir / "samples.jsonl", {"step": step, "prompt": f"p{step}", "response": "r"})


def test_what_is_half_written_or_damaged_is_left_out_until_it_is_whole(tmp_path):
    write(tmp_path, 1, 2)
    view = RunView(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward')
        file.flush()
        view.refresh()
        assert view.step == 2
        file.write('/mean": 0.5}\n{nonsense}\n[1]\n{"step": 4, "reward/mean": 1e999, "x": "text"}\n')
    view.refresh()
    assert [row["step"] for row in view.rows] == [1, 2, 3, 4] and view.series("reward/mean") == [
        (1, 1.0),
        (2, 1.0),
        (3, 0.5),
    ]


def test_rows_that_a_resumed_run_takes_back_are_gone_and_come_again(tmp_path):
    write(tmp_path, *range(1, 7))
    view = RunView(tmp_path)
    before = view.generation
    Checkpoints(tmp_path, keep=1).set_aside(3)
    write(tmp_path, 4, value=7.0)
    view.refresh()
    assert view.series("reward/mean") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 7.0)] and view.generation == before + 1
    assert [row["step"] for row in view.samples] == [1, 2, 3, 4]


@pytest.mark.parametrize("end", ["finished", "ended", None])
def test_a_run_says_how_it_ended_and_how_many_steps_it_had(tmp_path, end):
    logger = RunLogger(tmp_path, [], is_main=True, steps=9)
    logger.begin()
    with locked(tmp_path):
        write(tmp_path, 1, 2, 3)
        view = RunView(tmp_path)
        assert (view.state, view.step, view.total, view.seconds_per_step, view.seconds_left) == ("running", 3, 9, 2.0, 12.0)
        if end:
            logger.end(end, 3)
        logger.close()
    view.refresh()
    assert (view.state, view.total, view.seconds_left) == (end or "failed", 3 if end else 9, None)


def test_a_run_whose_process_is_gone_is_not_shown_as_running(tmp_path):
    script = (
        "import sys, os; from pathlib import Path; from fivefold.launch.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "steps": 9}))
    append_json(tmp_path / "metrics.jsonl", {"step": 1, "wall": time.time()})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-1.error").write_text("Traceback ...\nMemoryError: no more\n")
    held = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdout is not None and held.stdout.readline() == b"held\n"
    view = RunView(tmp_path)
    assert view.state == "running"
    os.kill(held.pid, 9)
    held.wait()
    view.refresh()
    assert (view.state, view.reason) == ("dead", "MemoryError: no more")


def test_warnings_are_those_of_the_latest_step_also_after_a_resume_from_an_older_one(tmp_path):
    def write(step: int, *rules: str) -> None:
        append_json(tmp_path / "metrics.jsonl", {"step": step, "wall": float(step)})
        for rule in rules:
            append_json(tmp_path / WARNINGS, {"step": step, "rule": rule, "text": f"{rule} at {step}"})

    write(1, "kl")
    write(2, "kl", "truncated")
    view = RunView(tmp_path)
    assert view.warnings == ["kl at 2", "truncated at 2"]
    write(3)
    view.refresh()
    assert view.warnings == []
    write(4, "kl")
    view.refresh()
    assert view.warnings == ["kl at 4"]
    # The run begins again after step 1: what was written of later steps moves aside.
    Checkpoints(tmp_path, keep=1).set_aside(1)
    assert [json.loads(line)["step"] for line in (tmp_path / WARNINGS).read_text().splitlines()] == [1]
    view.refresh()
    assert view.warnings == ["kl at 1"]
    assert [json.loads(line)["step"] for line in (tmp_path / "superseded-1" / WARNINGS).read_text().splitlines()] == [
        2,
        2,
        4,
    ]
