"""What a run's start takes is told by its parts, which together are the time from the command to the first response."""

from __future__ import annotations

import json
import time

import pytest

from fivefold.observability.start_up import VARIABLE, StartUp, command_began, created_at
from tests.support.commands import fivefold
from tests.support.whole_runs import make_model, write_run

PARTS = ["launch", "imports", "data", "models", "engine", "run", "weight_sync", "first_response"]
RUN = """
policy: {backend: "megatron:d2"}
algorithm: {group_size: 2}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 1}
"""


def test_parts_follow_each_other_without_a_gap_from_the_command_on(monkeypatch):
    created = created_at()
    monkeypatch.setenv(VARIABLE, str(created - 5.0))
    start = StartUp()
    start.mark("before it is counted")
    start.begin()
    time.sleep(0.05)
    for part in ("data", "models", "data"):
        start.mark(part)
    seconds, now = start.end("first_response"), time.time()
    assert list(seconds) == ["launch", "data", "models", "first_response"]
    assert seconds["launch"] == pytest.approx(5.0, abs=0.02) and seconds["data"] >= 0.05
    assert sum(seconds.values()) == pytest.approx(now - created + 5.0, abs=0.05)
    assert start.end("first_response") == {}, "it is over"


def test_ranks_count_from_the_command_of_the_user_or_from_the_call_in_a_program(monkeypatch):
    monkeypatch.setenv(VARIABLE, "12.5")
    assert command_began() == "12.5"
    monkeypatch.delenv(VARIABLE)
    assert float(command_began()) == pytest.approx(time.time(), abs=5)


def test_a_run_tells_what_its_start_took(tmp_path):
    make_model(tmp_path, rows=16)
    write_run(tmp_path, RUN)
    begin = time.time()
    done = fivefold("train", tmp_path / "run.yaml")
    took = time.time() - begin
    assert done.returncode == 0, done.stderr
    start = json.loads((tmp_path / "runs/base/trace/start.json").read_text())
    assert list(start["parts"]) == PARTS and start["seconds"] == pytest.approx(sum(start["parts"].values()), abs=0.01)
    row = json.loads((tmp_path / "runs/base/metrics.jsonl").read_text())
    assert 0 < start["seconds"] < took
    # The first sync and the first response are in the first step.
    in_step = start["parts"]["weight_sync"] + start["parts"]["first_response"]
    assert in_step < row["time/step"] + 1.0 and start["parts"]["imports"] > 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("start  ")]
    assert f"start    {start['seconds']:.1f} s from the command to the first response: " in line
