"""A rank's share of a checkpoint that any layout can read: pieces of tensors, and copies of them on the host."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fivefold.backend.host_memory import HostMemory, size_of
from fivefold.backend.sharded_files import Piece, write_pieces
from fivefold.distributed.threads import in_thread
from fivefold.files import write_text

STATE = "optimizer.json"
"""File with the state of optimizer and schedule."""


@dataclass(frozen=True)
class Share:
    """The share of a model that this rank writes."""

    rank: int
    pieces: list[Piece]
    state: dict[str, Any] | None
    """State of optimizer and schedule; None on ranks that do not write it."""

    def write(self, path: Path) -> list[Path]:
        """Write the share into the existing directory `path`; return the files."""
        files = [path / f"rank-{self.rank:05d}.safetensors"]
        write_pieces(files[0], self.pieces)
        if self.state is not None:
            files.append(path / STATE)
            write_text(files[-1], json.dumps(self.state, indent=1))
        return files


class HostCopies:
    """Copies shares into pinned host memory, which is kept: allocating it takes longer than copying."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Future[HostMemory] | None = None
        self._size = -1

    def prepare(self, share: Share) -> None:
        """Start to allocate the memory in a thread, unless it exists."""
        size = size_of([piece.values for piece in share.pieces])
        if size != self._size:
            self._size, self._memory = size, in_thread(lambda: HostMemory(size, self._device), "host memory")

    def of(self, share: Share) -> Share:
        """Return a host copy of the share as it is now; the previous copy must have been written."""
        self.prepare(share)
        assert self._memory is not None
        copied = []
        places = self._memory.result().places([piece.values for piece in share.pieces])
        for piece, place in zip(share.pieces, places, strict=True):
            copied.append(replace(piece, values=place.copy_(piece.values, non_blocking=True)))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return replace(share, pieces=copied)
