"""Trackers next to a run: what they get, and that one which fails or hangs costs the run nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fivefold.checkpoint.checkpoints import Checkpoints
from fivefold.cli import main
from fivefold.config import RunConfig
from fivefold.observability.trackers.state import State, without_secrets
from fivefold.plan.check import check
from tests.support.tracked import metrics_of, take_steps

FAULTY = """
import json, os, time
from pathlib import Path
AT, HOW, HERE = os.environ["FAULT"].split(":")[0], os.environ["FAULT"].split(":")[1], Path(__file__).parent
def at(place):
    if place == AT:
        if HOW == "hangs":
            time.sleep(1000)
        if HOW == "once" and (HERE / "failed").exists():
            return
        (HERE / "failed").touch()
        raise ConnectionError(f"no way to https://me:secret@host with {os.environ['WANDB_API_KEY']}")
class Run:
    url = None
    def define_metric(self, *names, **more): pass
    def log(self, row):
        at("table" if "samples" in row else "log")
        with (HERE / "got.jsonl").open("a") as file: file.write(json.dumps(row) + "\\n")
    def finish(self, exit_code): at("finish")
    class settings: mode = "online"
def init(**what):
    at("start")
    return Run()
def Settings(**what): return None
def Table(columns, data, allow_mixed_types): return data
"""
"""A library of W&B's surface that fails where it is told to."""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    (tmp_path / "library/wandb.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'library'}:{Path(__file__).parents[2] / 'src'}")
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123456789")
    return tmp_path / "library"


@pytest.mark.parametrize("fault", ["start:raises", "log:hangs", "finish:hangs"])
def test_a_tracker_that_fails_or_hangs_ends_no_run_and_loses_none_of_its_rows(tmp_path, faulty, fault):
    begin = time.monotonic()
    output = take_steps(tmp_path / "r", ["wandb"], 1, 4, seconds=0.5, FAULT=fault)
    assert time.monotonic() - begin < 20
    assert sorted(metrics_of(tmp_path / "r")["reward/mean"]) == [1, 2, 3, 4]
    lines = [line for line in output.splitlines() if line.startswith("wandb: ")]
    if fault == "finish:hangs":
        assert lines == [f"wandb: did not finish within 0.5 s; `fivefold track {tmp_path / 'r'}` tries again"]
    else:
        reason = (
            "it did not answer within 0.5 s" if "hangs" in fault else "ConnectionError: no way to https://...@host with ***"
        )
        assert lines[-1].startswith(f"wandb: 4 of 4 steps were not sent: {reason}; they are in metrics.jsonl")
        assert len(lines) == (1 if "hangs" in fault else 2)
    texts = [path.read_text() for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert not any("abcdef0123456789" in text for text in [output, *texts]), "keys stand nowhere"


def test_what_a_tracker_missed_is_sent_when_it_answers_again(tmp_path, faulty):
    output = take_steps(tmp_path / "r", ["wandb"], 1, 3, FAULT="log:once")
    got = [json.loads(line) for line in (faulty / "got.jsonl").read_text().splitlines()]
    assert [row["step"] for row in got if "samples" not in row] == [1, 2, 3]
    assert "the run continues, and it is tried again" in output and "wandb: takes metrics again" in output
    assert "not sent" not in output and State.read(tmp_path / "r", "wandb").has_finished


def test_a_run_that_has_ended_is_sent_to_trackers_that_have_not_got_it(tmp_path, faulty, monkeypatch, capsys):
    run_dir = tmp_path / "r"
    take_steps(run_dir, ["wandb"], 1, 3, seconds=0.5, FAULT="start:raises")
    monkeypatch.setenv("FAULT", "none:")
    monkeypatch.syspath_prepend(faulty)
    assert main(["track", str(run_dir), "--to", "wandb", "--wait", "20"]) == 0
    got = [json.loads(line) for line in (faulty / "got.jsonl").read_text().splitlines()]
    assert [row["step"] for row in got if "samples" not in row] == [1, 2, 3]
    assert capsys.readouterr().out == "wandb: has steps up to 3\n"


def test_samples_that_a_tracker_refuses_are_left_out_and_counted(tmp_path, faulty):
    output = take_steps(tmp_path / "r", ["wandb"], 1, 3, FAULT="table:raises")
    got = [json.loads(line) for line in (faulty / "got.jsonl").read_text().splitlines()]
    assert [row["step"] for row in got] == [1, 2, 3]
    assert "wandb: refused the samples of 1 steps; trackers/wandb.log has the reason" in output


def test_tensorboard_shows_one_timeline_of_a_run_that_was_killed_and_resumed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "r"
    take_steps(run_dir, ["tensorboard"], 1, 5, killed="itself")
    Checkpoints(run_dir, keep=1).set_aside(2)
    time.sleep(1.1)  # TensorBoard orders files by seconds.
    take_steps(run_dir, ["tensorboard"], 3, 4)
    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    expected = metrics_of(run_dir)
    assert {name: {event.step: event.value for event in board.Scalars(name)} for name in board.Tags()["scalars"]} == {
        name: {step: pytest.approx(value, rel=1e-7) for step, value in values.items()} for name, values in expected.items()
    }
    assert [event.step for event in board.Scalars("reward/mean")] == [1, 2, 3, 4]
    samples = board.Tensors("samples")
    assert {event.step for event in samples} == {2, 4}
    assert b"    <b>2</b>\n    |two| \xe2\x80\xa8" in samples[0].tensor_proto.string_val[0]


def test_tensorboard_s_events_are_where_tensorboard_dir_says(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    take_steps(tmp_path / "r", ["tensorboard"], 1, 2, tensorboard_dir=str(tmp_path / "events"))
    assert not (tmp_path / "r/tensorboard").exists()
    board = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in board.Scalars("reward/mean")] == [1, 2]


def test_a_run_that_starts_from_scratch_has_a_tracked_run_of_its_own(tmp_path):
    ids = set()
    for _ in range(2):
        take_steps(tmp_path / "r", ["tensorboard"], 1, 1)
        ids.add(State.read(tmp_path / "r", "tensorboard").id)
        Checkpoints(tmp_path / "r", keep=1).set_aside(0)
    assert len(ids) == 2


def test_messages_have_no_keys_and_no_logins():
    environment = {"WANDB_API_KEY": "abcdef012345", "HOME": "/home/x"}
    text = without_secrets("at http://me:pw@host/x with abcdef012345 in /home/x", environment)
    assert text == "at http://...@host/x with *** in /home/x"


def test_check_names_a_tracker_that_is_not_installed_and_keys_that_no_tracker_reads(monkeypatch):
    config = RunConfig.of(model={"path": "m/m"}, trainer={"loggers": ["console"]}, tracking={"project": "sums"})
    assert ("tracking", "trainer.loggers names no tracker") in check(config).ignored
    config = RunConfig.of(model={"path": "m/m"}, trainer={"loggers": ["tensorboard"]}, tracking={"offline": True})
    assert "tracking.offline" in dict(check(config).ignored)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    errors = check(RunConfig.of(model={"path": "m/m"}, trainer={"loggers": ["wandb"]})).errors
    assert "trainer.loggers: wandb, not installed here: pip install wandb, or leave wandb out" in errors
