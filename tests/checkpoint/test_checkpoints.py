from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fivefold.checkpoint.checkpoints import Checkpoints, RunState, find_corruption, size_and_digest


def state(step: int) -> RunState:
    return RunState(step=step, version=step, layout="megatron:d1t1p1", rollouts={"position": 8 * step}, kl_coef=0.1)


def write(checkpoints: Checkpoints, step: int, content: bytes = b"weights") -> Path:
    checkpoints.stage(step, ["policy"])
    part = checkpoints.staging(step) / "policy" / "part"
    part.write_bytes(content)
    checkpoints.publish(state(step), {"policy/part": size_and_digest(part)})
    return checkpoints.path(step)


def test_only_the_newest_are_kept_and_latest_names_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        path = write(checkpoints, step)
    names = sorted(item.name for item in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-000002", "step-000003"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000003"
    assert RunState.read(path) == state(3)
    assert checkpoints.latest(print) == path


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    good = write(checkpoints, 1)

    checkpoints.stage(2, ["policy"])
    (checkpoints.staging(2) / "policy" / "half").write_bytes(b"x")
    said: list[str] = []
    assert checkpoints.latest(said.append) == good
    assert "was not finished" in said[0]
    assert write(checkpoints, 2).name == "step-000002"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda d: (d / "policy/part").write_bytes(b"weight"), "has 6 bytes instead of 7"),
        (lambda d: (d / "policy/part").write_bytes(b"weighty"), "has other content"),
        (lambda d: (d / "policy/part").unlink(), "policy/part is missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path, harm, says):
    path = write(Checkpoints(tmp_path, keep=1), 1)
    assert find_corruption(path) == ""
    harm(path)
    assert says in find_corruption(path)


def test_large_files_are_checked_at_head_and_tail(tmp_path, monkeypatch):
    monkeypatch.setattr("fivefold.checkpoint.checkpoints._DIGEST_BYTES", 4)
    path = write(Checkpoints(tmp_path, keep=1), 1, b"0123456789abcdef")
    (path / "policy/part").write_bytes(b"0123456789abcdeF")
    assert "has other content" in find_corruption(path)


RECORDS = ("metrics.jsonl", "samples.jsonl", "trace/stages.jsonl")


def write_rows(run_dir: Path, steps: range) -> None:
    (run_dir / "trace").mkdir(exist_ok=True)
    for name in RECORDS:
        (run_dir / name).write_text("".join(f'{{"step": {step}, "text": "a\u2028b"}}\n' for step in steps))


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().split("\n")[:-1]]


def test_a_run_that_starts_over_keeps_what_it_writes_and_moves_what_was_there(tmp_path):
    """Retention counts the run's own checkpoints: the 30 and 40 of the run before would cost it every one of its own."""
    old = Checkpoints(tmp_path, keep=2)
    for step in (30, 40):
        write(old, step, b"old")
    write_rows(tmp_path, range(41))
    (tmp_path / "run.yaml").write_text("old")
    checkpoints = Checkpoints(tmp_path, keep=1)
    aside = checkpoints.set_aside(0)
    assert all(steps_in(aside / name) == list(range(41)) and steps_in(tmp_path / name) == [] for name in RECORDS)
    assert (aside / "run.yaml").read_text() == "old"
    assert find_corruption(aside / "checkpoints/step-000040") == ""
    assert not (tmp_path / "checkpoints/latest").exists()
    for step in (2, 4):
        assert write(checkpoints, step).is_dir(), "what was just written stays"
    assert (tmp_path / "checkpoints" / (tmp_path / "checkpoints/latest").read_text()).is_dir()
    assert checkpoints.latest(print).name == "step-000004"


def test_what_was_just_written_stays_next_to_newer_ones(tmp_path):
    """A directory from before there was one timeline in it: retention looks at no step after the one that was written."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (30, 40):
        write(Checkpoints(tmp_path, keep=9), step, b"abandoned")
    written = write(checkpoints, 5)
    assert written.is_dir()
    said: list[str] = []
    assert checkpoints.latest(said.append) == written, "latest names it"
    assert said == [f"{tmp_path}/checkpoints/latest names step 5: not looked at are step-000030, step-000040"]


def test_a_run_that_goes_on_from_an_older_step_moves_newer_checkpoints_and_rows(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        write(checkpoints, step)
    write_rows(tmp_path, range(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "half')
    aside = checkpoints.set_aside(1)
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000001"
    for name in RECORDS:
        assert (steps_in(tmp_path / name), steps_in(aside / name)) == ([0, 1], [2, 3, 4])
    assert checkpoints.set_aside(1) is None


def test_a_row_that_was_being_written_is_not_continued_by_the_next_one(tmp_path):
    """Nothing is to be moved: all whole rows stay, and what a kill or a full disk left of another one is kept apart."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    write(checkpoints, 5)
    write_rows(tmp_path, range(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "half')
    assert checkpoints.set_aside(5) is None
    for name in RECORDS:
        assert steps_in(tmp_path / name) == [0, 1, 2, 3, 4]
        assert (tmp_path / name).read_bytes().endswith(b"}\n")


def test_rows_that_cannot_be_read_are_named_and_kept_next_to_the_others(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    write(checkpoints, 5)
    write_rows(tmp_path, range(5))
    damaged = [
        "not json",
        "[1, 2]",
        '"text"',
        "3",
        "null",
        '{"loss": 1}',
        '{"step": "4"}',
        '{"step": true}',
        "[" * 100_000,
        "\0\0",
    ]
    path = tmp_path / "metrics.jsonl"
    rows = path.read_text().split("\n")[:-1]
    path.write_text("\n".join([rows[0], *damaged, *rows[1:], "", '{"step": 5}']))
    said: list[str] = []
    assert checkpoints.set_aside(5, warn=said.append) is None
    assert steps_in(path) == [0, 1, 2, 3, 4, 5], "a last row that is whole stays, with or without an end of its line"
    beside = tmp_path / "metrics.jsonl.unreadable"
    assert beside.read_text().split("\n")[:-1] == damaged
    assert said == [
        f"{path}: lines 2, 3, 4, 5, 6 and 5 more must be a JSON object with the number of a step: kept in {beside}"
    ]
    path.write_text(path.read_text() + "again\n")
    checkpoints.set_aside(5, warn=said.append)
    assert beside.read_text().split("\n")[:-1] == [*damaged, "again"] and ": line 7 must be" in said[1]


def test_a_kill_while_newer_checkpoints_are_moved_leaves_the_older_one_to_resume_from(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        write(checkpoints, step)

    def killed_at_3(path: Path, target: Path) -> None:
        if path.name == "step-000003":
            raise KeyboardInterrupt
        os.rename(path, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", killed_at_3)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.set_aside(1)
    assert checkpoints.latest(print) == tmp_path / "checkpoints/step-000001"
    assert sorted(path.name for path in checkpoints.set_aside(1).glob("checkpoints/*")) == ["step-000003", "step-000004"]


def test_the_newest_is_the_one_of_the_highest_number_also_beyond_six_digits(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (999_999, 1_000_000):
        path = write(checkpoints, step)
    assert path.is_dir() and checkpoints.latest(print) == path
    (tmp_path / "checkpoints/latest").unlink()
    assert checkpoints.latest(print) == path
