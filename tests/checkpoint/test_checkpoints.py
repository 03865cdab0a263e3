from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.checkpoint.checkpoints import Checkpoints, RunState, find_corruption


def state(step: int) -> RunState:
    return RunState(step=step, version=step, seed=0, layout="megatron:d1t1p1", rollouts={"position": 8 * step}, kl_coef=0.1)


def write(checkpoints: Checkpoints, step: int, content: bytes = b"weights") -> Path:
    def fill(directory: Path) -> None:
        (directory / "policy").mkdir()
        (directory / "policy" / "part").write_bytes(content)

    return checkpoints.write(state(step), True, lambda: None, fill)


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

    def fail(directory: Path) -> None:
        (directory / "policy").mkdir()
        (directory / "policy" / "half").write_bytes(b"x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(state(2), True, lambda: None, fail)
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


def test_a_run_that_starts_over_keeps_what_it_writes_and_moves_what_was_newer(tmp_path):
    old = Checkpoints(tmp_path, keep=2)
    for step in (30, 40):
        write(old, step, b"old")
    (tmp_path / "metrics.jsonl").write_text("old")
    checkpoints = Checkpoints(tmp_path, keep=1)
    aside = checkpoints.set_aside(0)
    assert (aside / "metrics.jsonl").read_text() == "old" and not (tmp_path / "metrics.jsonl").exists()
    assert find_corruption(aside / "checkpoints/step-000040") == ""
    assert not (tmp_path / "checkpoints/latest").exists()
    for step in (2, 4):
        assert write(checkpoints, step).is_dir(), "what was just written stays"
    assert (tmp_path / "checkpoints" / (tmp_path / "checkpoints/latest").read_text()).is_dir()
    assert checkpoints.latest(print).name == "step-000004"


def test_a_run_that_goes_on_from_an_older_step_moves_the_newer_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        write(checkpoints, step)
    aside = checkpoints.set_aside(1)
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000001"
    assert checkpoints.set_aside(1) is None
