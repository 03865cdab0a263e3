from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fivefold.checkpoint.checkpoints import Checkpoints, RunState
from fivefold.checkpoint.manifest import Manifest, entry_of, find_corruption, sum_of_ends
from fivefold.errors import describe_error


def state(step: int) -> RunState:
    return RunState(step=step, version=step, layout="megatron:d1t1p1", rollouts={"position": 8 * step}, kl_coef=0.1)


def write(checkpoints: Checkpoints, step: int, content: bytes = b"weights") -> Path:
    checkpoints.stage(step, ["policy"])
    part = checkpoints.staging(step) / "policy" / "part"
    part.write_bytes(content)
    checkpoints.publish(state(step), {"policy/part": entry_of(part)})
    return checkpoints.path(step)


def test_only_the_latest_are_kept_and_latest_names_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        path = write(checkpoints, step)
    names = sorted(item.name for item in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-000002", "step-000003"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000003"
    assert RunState.read(path) == state(3)
    assert checkpoints.latest(print) == path


def test_the_state_that_an_earlier_version_wrote_is_read(tmp_path):
    path = write(Checkpoints(tmp_path, keep=1), 1)
    earlier = {**json.loads((path / "state.json").read_text()), "reward_mean": 0.5}
    (path / "state.json").write_text(json.dumps(earlier))
    assert RunState.read(path) == state(1)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    good = write(checkpoints, 1)

    checkpoints.stage(2, ["policy"])
    (checkpoints.staging(2) / "policy" / "half").write_bytes(b"x")
    messages: list[str] = []
    assert checkpoints.latest(messages.append) == good
    assert "was not finished" in messages[0]
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


def test_one_bit_in_the_middle_of_a_large_file_is_found(tmp_path):
    """85 MB: the first and the last 16 MiB were all that was looked at once."""
    path = write(Checkpoints(tmp_path, keep=1), 1, bytes(85 * 10**6))
    with (path / "policy/part").open("r+b") as file:
        file.seek(42 * 10**6)
        file.write(b"\x01")
    assert find_corruption(path) == "policy/part has other content than was written"


def old_manifest(path: Path) -> None:
    """Write the manifest of a checkpoint as it was written before every byte had a sum."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    listed = {str(file.relative_to(path)): [file.stat().st_size, sum_of_ends(file)] for file in files}
    (path / "manifest.json").write_text(json.dumps({"files": listed}, indent=1))


def test_a_checkpoint_without_sums_of_every_byte_is_resumed_with_a_line(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = write(checkpoints, 1)
    old_manifest(path)
    messages: list[str] = []
    assert checkpoints.latest(messages.append) == path
    assert messages == [
        f"checkpoint {path} was written before every byte had a sum: of files above 32 MiB only both ends are checked"
    ]
    (path / "policy/part").write_bytes(b"weighty")
    assert "has other content" in find_corruption(path)


@pytest.mark.parametrize(
    "manifest",
    [
        "[]",
        "3",
        "null",
        "{}",
        '{"files": []}',
        '{"files": {}}',
        '{"files": {"state.json": 3}}',
        '{"files": {"state.json": [1, 2, 3]}}',
        '{"files": {"state.json": ["1", 2]}}',
        '{"files": {"../../etc/passwd": [1, 2]}}',
        '{"files": {"state.json": [184, 184, "0"]}, "sum": 1}',
        "[" * 100_000,
        "\0" * 100,
        "\xff",
    ],
)
def test_a_manifest_of_another_shape_is_damage_and_no_traceback(tmp_path, manifest):
    checkpoints = Checkpoints(tmp_path, keep=2)
    before, path = write(checkpoints, 1), write(checkpoints, 2)
    (path / "manifest.json").write_bytes(manifest.encode("latin-1"))
    messages: list[str] = []
    assert checkpoints.latest(messages.append) == before
    assert len(messages) == 1 and f"checkpoint {path} is damaged and skipped: manifest.json " in messages[0]


POINTERS = [
    b"",
    b"hello",
    b"\0" * 11,
    b"step-4",
    b"step-000000",
    b"checkpoints/step-000002",
    b"/x/step-000002",
    b"\xff\xfe",
    b"step-00000\xd9\xa3",
]


@pytest.mark.parametrize("pointer", POINTERS)
def test_a_pointer_that_names_no_checkpoint_is_said_and_the_latest_is_taken(tmp_path, pointer):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4):
        write(checkpoints, step)
    (tmp_path / "checkpoints/latest").write_bytes(pointer)
    messages: list[str] = []
    assert checkpoints.latest(messages.append) == checkpoints.path(4)
    assert len(messages) == 1 and "latest must hold the name of a checkpoint: got " in messages[0]
    (checkpoints.path(4) / "policy/part").unlink()
    assert checkpoints.latest(messages.append) == checkpoints.path(2)


def test_a_pointer_that_is_a_directory_or_leads_nowhere_is_no_pointer(tmp_path):
    checkpoints, pointer = Checkpoints(tmp_path, keep=3), tmp_path / "checkpoints/latest"
    path = write(checkpoints, 2)
    pointer.unlink()
    for make in (pointer.mkdir, lambda: pointer.symlink_to("nowhere"), lambda: pointer.symlink_to("latest")):
        make()
        messages: list[str] = []
        assert checkpoints.latest(messages.append) == path and len(messages) == 1
        pointer.rmdir() if pointer.is_dir() else pointer.unlink()


def test_checkpoints_of_which_none_is_whole_refuse_to_start_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4):
        write(checkpoints, step)
    (checkpoints.path(2) / "policy/part").write_bytes(b"w")
    (checkpoints.path(4) / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="none can be used") as refused:
        checkpoints.latest(lambda text: None)
    for part in ("step-000002: policy/part has 1 bytes instead of 7", "step-000004: manifest.json must", "resume: never"):
        assert part in str(refused.value)
    for step in (2, 4):
        shutil.rmtree(checkpoints.path(step))
    with pytest.raises(ValueError, match="step-000004: latest names it, and it is not there"):
        checkpoints.latest(lambda text: None)


@pytest.mark.parametrize(
    "name", ["latest", "step-000002/manifest.json", "step-000002/state.json", "step-000002/policy/part"]
)
def test_a_file_that_cannot_be_read_is_no_damage_and_ends_the_start(tmp_path, monkeypatch, capsys, name):
    """Reading the memory of a process at 0 is an input/output error for every process."""
    monkeypatch.setattr("fivefold.summed_files._PAUSES", (0.0, 0.0))
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2):
        write(checkpoints, step)
    path = tmp_path / "checkpoints" / name
    path.unlink()
    path.symlink_to("/proc/self/mem")
    if name.startswith("step-000002/") and "manifest" not in name:
        # The link has the size that the file had as far as the manifest is concerned.
        manifest = json.loads((checkpoints.path(2) / "manifest.json").read_text())["files"]
        manifest[name.partition("/")[2]][0] = 0
        (checkpoints.path(2) / "manifest.json").write_text(Manifest(manifest).text)
    with pytest.raises(OSError, match="Input/output error") as ended:
        checkpoints.latest(lambda text: None)
    assert describe_error(ended.value) == f"{path}: Input/output error"
    assert capsys.readouterr().out.count("reading it again") == 2


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
    messages: list[str] = []
    assert checkpoints.latest(messages.append) == written, "latest names it"
    assert messages == [f"{tmp_path}/checkpoints/latest names step 5: not looked at are step-000030, step-000040"]


def test_a_run_that_continues_from_an_older_step_moves_newer_checkpoints_and_rows(tmp_path):
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
    messages: list[str] = []
    assert checkpoints.set_aside(5, warn=messages.append) is None
    assert steps_in(path) == [0, 1, 2, 3, 4, 5], "a last row that is whole stays, with or without an end of its line"
    beside = tmp_path / "metrics.jsonl.unreadable"
    assert beside.read_text().split("\n")[:-1] == damaged
    assert messages == [
        f"{path}: lines 2, 3, 4, 5, 6 and 5 more must be a JSON object with the number of a step: kept in {beside}"
    ]
    path.write_text(path.read_text() + "again\n")
    checkpoints.set_aside(5, warn=messages.append)
    assert beside.read_text().split("\n")[:-1] == [*damaged, "again"] and ": line 7 must be" in messages[1]


def test_a_kill_while_newer_checkpoints_are_moved_keeps_the_older_one_to_resume_from(tmp_path, monkeypatch):
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


def test_the_latest_is_the_one_of_the_highest_number_also_beyond_six_digits(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (999_999, 1_000_000):
        path = write(checkpoints, step)
    assert path.is_dir() and checkpoints.latest(print) == path
    (tmp_path / "checkpoints/latest").unlink()
    assert checkpoints.latest(print) == path
