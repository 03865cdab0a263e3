"""The micro-batch that is computed now: layers of transformers are passed hidden states alone, and find its packing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fivefold.backend.packing import Packing
from fivefold.fsdp.mesh import Mesh


@dataclass(frozen=True)
class Current:
    """The micro-batch that is being computed, as the layers read it."""

    packing: Packing
    mesh: Mesh
    most_tokens: int
    """Largest number of tokens on a rank, among the ranks that exchange tokens for experts."""


_current: list[Current] = []
"""The micro-batch that is computed, last; layers that are recomputed in backward find the same one."""


@contextmanager
def packed(packing: Packing, mesh: Mesh) -> Iterator[None]:
    """Within this context, forward and backward, layers treat the sequences of `packing` apart. Collective."""
    assert packing.positions_T is not None
    most = torch.tensor(len(packing.positions_T))
    if mesh.tokens.size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.tokens)
    _current.append(Current(packing, mesh, int(most)))
    try:
        yield
    finally:
        _current.pop()


def current() -> Current | None:
    """Return the micro-batch; None while transformers computes one sequence by itself."""
    return _current[-1] if _current else None
