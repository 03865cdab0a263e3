"""An error of a full disk names the file that was written."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.errors import sentence_of
from fivefold.files import write_text, writing
from fivefold.observability.run_logger import append_json
from fivefold.rollout.group_files import write_groups
from fivefold.types import TokenBatch

BATCH = TokenBatch(torch.tensor([1, 2]), torch.tensor([False, True]), [2])


def pieces(path: Path) -> None:
    from fivefold.backend.sharded_files import write_pieces

    values = torch.arange(1 << 20, dtype=torch.float32)
    write_pieces(path, [SimpleNamespace(name="a", box=SimpleNamespace(offset=[0], size=[1 << 20]), values=values)])


WRITERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda path: append_json(path, {"step": 1, "reward/mean": 0.5}),
    "state.json": lambda path: write_text(path, "x" * 100),
    "rank-00000.safetensors": pieces,
    "batch.safetensors": BATCH.save,
    "groups.safetensors": lambda path: write_groups(path, {}, set()),
}


@contextmanager
def no_room() -> Iterator[None]:
    """The system refuses to make a file larger than 16 bytes, in the words of another error than that of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", WRITERS)
def test_an_error_of_a_full_disk_names_the_file(tmp_path, name):
    """Python's own errors of writing have no name of a file, and those of safetensors are no errors of the system."""
    with pytest.raises(OSError, match="File too large") as caught, no_room():
        WRITERS[name](tmp_path / name)
    assert caught.value.errno == errno.EFBIG
    assert sentence_of(caught.value) == f"{tmp_path / name}: File too large"


def test_other_errors_pass_as_they_are(tmp_path):
    with pytest.raises(ValueError, match=r"^os error 28$"), writing(tmp_path):
        raise ValueError("os error 28")
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "none" / "file", "")
    assert caught.value.filename == str(tmp_path / "none" / "file")
