"""Every byte of a checkpoint counts: whatever is changed in whatever file is found before it is used."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fivefold.backend.sharded_files import Box, Piece, PieceReader
from fivefold.backend.shares import Share
from fivefold.checkpoint.checkpoints import Checkpoints, RunState, find_corruption
from fivefold.checkpoint.manifest import MANIFEST, entry_of
from fivefold.summed_files import BLOCK, DamagedFile

SHAPES = {"a": (3, BLOCK // 4), "b": (7, 11), "c": (), "d": (5,)}
"""The first has more than one block in each rank's file."""


def write(run_dir: Path, step: int) -> Path:
    """Write a checkpoint as two ranks write one."""
    checkpoints = Checkpoints(run_dir, keep=9)
    checkpoints.stage(step, ["policy", "rng", "rollouts"])
    directory = checkpoints.staging(step)
    torch.manual_seed(step)
    files = []
    for rank in range(2):
        pieces = [
            Piece(f"{name}.{rank}", Box(tuple(0 for _ in shape), shape), torch.randn(shape).to(kind))
            for name, shape in SHAPES.items()
            for kind in (torch.float32 if rank else torch.bfloat16,)
        ]
        files += Share(rank, pieces, None if rank else {"step": 7.0, "schedule": {"num_steps": step}}).write(
            directory / "policy"
        )
        files.append(directory / "rng" / f"2-ranks-{rank}.safetensors")
        save_file({"cpu": torch.randint(0, 256, (5056,), dtype=torch.uint8)}, files[-1])
    files += [directory / "run.yaml", directory / "rollouts" / "groups.safetensors"]
    files[-2].write_text(f"trainer: {{steps: {step}}}\n")
    save_file({"token_ids_T": torch.arange(step, step + 100)}, files[-1], metadata={"groups": "[]"})
    state = RunState(step=step, version=step, layout="megatron:d2", rollouts={"position": step}, kl_coef=0.1)
    checkpoints.publish(state, {str(file.relative_to(directory)): entry_of(file) for file in files})
    return checkpoints.path(step)


def what_is_found(path: Path) -> str:
    """What a run that resumes finds: first in manifest and small files, then while each rank reads its part of the tensors."""
    if fault := find_corruption(path):
        return fault
    try:
        reader = PieceReader(path / "policy")
        for rank in range(2):
            for name, shape in SHAPES.items():
                reader.fill(f"{name}.{rank}", Box(tuple(0 for _ in shape), shape), torch.empty(shape))
    except DamagedFile as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    run_dir = tmp_path_factory.mktemp("run")
    return write(run_dir, 2), write(run_dir, 4)


def files_of(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def changes(path: Path, name: str, other: Path, seed: int):
    """(what is done, new content) of one file of a checkpoint."""
    content = (path / name).read_bytes()
    chance = random.Random(f"{seed} {name}")
    places = {0, 1, 7, 8, len(content) // 2, len(content) - 1, *(chance.randrange(len(content)) for _ in range(12))}
    if name.endswith(".safetensors"):
        header = 8 + int.from_bytes(content[:8], "little")
        # Every region of the header, its padding, and both sides of where blocks meet.
        places |= {
            *range(8),
            *range(8, header, max(1, header // 40)),
            header - 1,
            header,
            header + BLOCK - 1,
            header + BLOCK,
        }
    for place in sorted(place for place in places if place < len(content)):
        bit = 1 << chance.randrange(8)
        yield f"bit {bit:#x} of byte {place}", content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
    middle = chance.randrange(len(content))
    zeros = bytearray(content)
    zeros[middle : middle + 1000] = bytes(len(zeros[middle : middle + 1000]))
    yield f"1,000 zeros at {middle}", bytes(zeros)
    yield "no byte", b""
    yield f"the first {middle} bytes", content[:middle]
    yield "a byte less", content[:-1]
    yield "a byte more", content + b"\0"
    yield "twice", content + content
    first, second = sorted(chance.sample(range(0, len(content) - 8, 8), 2))
    swapped = bytearray(content)
    swapped[first : first + 8], swapped[second : second + 8] = content[second : second + 8], content[first : first + 8]
    yield f"the words at {first} and {second} exchanged", bytes(swapped)
    if len(content) > 2 * BLOCK:
        yield "two blocks exchanged", content[: -2 * BLOCK] + content[-BLOCK:] + content[-2 * BLOCK : -BLOCK]
    yield "the file of another step", (other / name).read_bytes()


NAMES = [
    MANIFEST,
    "policy/optimizer.json",
    "policy/rank-00000.safetensors",
    "policy/rank-00001.safetensors",
    "rng/2-ranks-0.safetensors",
    "rng/2-ranks-1.safetensors",
    "rollouts/groups.safetensors",
    "run.yaml",
    "state.json",
]


def test_the_checkpoint_of_the_damage_tests_is_whole_and_has_every_kind_of_file(checkpoints):
    for path in checkpoints:
        assert files_of(path) == NAMES and what_is_found(path) == ""


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_of_every_file_of_a_checkpoint_counts(checkpoints, name):
    other, path = checkpoints
    content = (path / name).read_bytes()
    for change, new in changes(path, name, other, seed=int(os.environ.get("FIVEFOLD_SEED", "2026"))):
        if new == content or (change.startswith("the file of another") and name == MANIFEST):
            continue
        (path / name).write_bytes(new)
        try:
            assert what_is_found(path), f"{name}: {change} is not found"
        finally:
            (path / name).write_bytes(content)
    assert what_is_found(path) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_missing_or_of_another_kind_is_named(checkpoints, tmp_path, name):
    path = tmp_path / "copy"
    for change in (
        Path.unlink,
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), file.symlink_to(file)),
    ):
        shutil.copytree(checkpoints[1], path)
        change(path / name)
        assert name in what_is_found(path)
        shutil.rmtree(path)


def test_a_file_that_was_not_written_with_a_checkpoint_is_named(checkpoints, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(checkpoints[1], path)
    shutil.copy(checkpoints[0] / "policy/rank-00001.safetensors", path / "policy/rank-00002.safetensors")
    assert what_is_found(path) == "policy/rank-00002.safetensors was not written with it: remove it"


def test_a_rank_that_reads_a_part_of_a_tensor_checks_that_part(tmp_path):
    """Damage in the first rows is nothing to a rank that reads the last ones."""
    rows = 3 * BLOCK // 4096
    values = torch.randn(rows, 1024)
    Share(0, [Piece("w", Box((0, 0), (rows, 1024)), values)], None).write(tmp_path)
    file = tmp_path / "rank-00000.safetensors"
    begin = file.stat().st_size - values.nbytes
    with file.open("r+b") as opened:
        opened.seek(begin + BLOCK + 17)
        byte = opened.read(1)
        opened.seek(begin + BLOCK + 17)
        opened.write(bytes([byte[0] ^ 4]))
    third = rows // 3
    for first, is_damaged in ((0, False), (third, True), (2 * third, False)):
        read = torch.empty(third, 1024)
        if is_damaged:
            with pytest.raises(DamagedFile, match="has other content than was written"):
                PieceReader(tmp_path).fill("w", Box((first, 0), (third, 1024)), read)
        else:
            PieceReader(tmp_path).fill("w", Box((first, 0), (third, 1024)), read)
            assert torch.equal(read, values[first : first + third])
    # A column of each row touches every block.
    with pytest.raises(DamagedFile):
        PieceReader(tmp_path).fill("w", Box((0, 3), (rows, 1)), torch.empty(rows, 1))


def test_two_files_of_tensors_that_are_exchanged_are_found(checkpoints, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(checkpoints[1], path)
    first, second = (path / f"rng/2-ranks-{rank}.safetensors" for rank in range(2))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    assert what_is_found(path).endswith("has other content than was written")
