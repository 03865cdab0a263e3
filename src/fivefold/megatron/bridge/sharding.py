"""Kinds of cut: full Hugging Face tensors <-> the shard of one tensor-parallel rank.

A full tensor is anything that can be sliced like one, so a rank reads from a file only what is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.models.spec import ModelSpec


class Sliceable(Protocol):
    """A tensor, or a tensor in a file."""

    def __getitem__(self, index: Any) -> Tensor: ...


class Sharding(Protocol):
    def shard(self, full: Sequence[Sliceable], rank: int, size: int, shape: ModelSpec) -> Tensor:
        """The Megatron-Core parameter of tensor-parallel `rank` of `size`."""
        ...

    def merge(self, shards: Sequence[Tensor], shape: ModelSpec) -> list[Tensor]:
        """The Hugging Face tensors of the shards of all ranks."""
        ...


class Replicate:
    """The same on every rank."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, shape: ModelSpec) -> Tensor:
        return full[0][:]

    def merge(self, shards: Sequence[Tensor], shape: ModelSpec) -> list[Tensor]:
        return [shards[0]]


class Vocabulary:
    """Rows of the vocabulary, padded with zeros to `shape.padded_vocab`."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, shape: ModelSpec) -> Tensor:
        rows = shape.padded_vocab // size
        begin, end = rank * rows, (rank + 1) * rows
        present = full[0][min(begin, shape.vocab) : min(end, shape.vocab)]
        if len(present) == rows:
            return present
        return torch.cat([present, present.new_zeros(rows - len(present), shape.hidden)])

    def merge(self, shards: Sequence[Tensor], shape: ModelSpec) -> list[Tensor]:
        return [torch.cat(list(shards))[: shape.vocab]]


class ColumnParallel:
    """The output dimension is cut (mcore ColumnParallelLinear)."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, shape: ModelSpec) -> Tensor:
        rows = _size(full[0], 0) // size
        return full[0][rank * rows : (rank + 1) * rows]

    def merge(self, shards: Sequence[Tensor], shape: ModelSpec) -> list[Tensor]:
        return [torch.cat(list(shards))]


class RowParallel:
    """The input dimension is cut (mcore RowParallelLinear)."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, shape: ModelSpec) -> Tensor:
        width = _size(full[0], 1) // size
        return full[0][:, rank * width : (rank + 1) * width]

    def merge(self, shards: Sequence[Tensor], shape: ModelSpec) -> list[Tensor]:
        return [torch.cat(list(shards), dim=1)]


class GateUp:
    """[gate; up] of each shard, one on top of the other."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, shape: ModelSpec) -> Tensor:
        rows = _size(full[0], 0) // size
        return torch.cat([part[rank * rows : (rank + 1) * rows] for part in full])

    def merge(self, shards: Sequence[Tensor], shape: ModelSpec) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves])]


class QKV:
    """Interleaved by query group: the queries of a group, its key, its value; weights and biases alike."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, shape: ModelSpec) -> Tensor:
        groups = shape.kv_heads // size
        parts = []
        for part, per_group in zip(full, self._rows(shape), strict=True):
            rows = groups * per_group
            own = part[rank * rows : (rank + 1) * rows]
            parts.append(own.reshape(groups, per_group, *own.shape[1:]))
        stacked = torch.cat(parts, dim=1)
        return stacked.reshape(-1, *stacked.shape[2:])

    def merge(self, shards: Sequence[Tensor], shape: ModelSpec) -> list[Tensor]:
        together = torch.cat(list(shards))
        grouped = together.reshape(shape.kv_heads, -1, *together.shape[1:])
        return [part.reshape(-1, *together.shape[1:]) for part in grouped.split(self._rows(shape), dim=1)]

    @staticmethod
    def _rows(shape: ModelSpec) -> list[int]:
        return [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]


def _size(part: Sliceable, dimension: int) -> int:
    # Tensors in a file (safetensors) have get_shape, tensors in memory have shape.
    sizes = part.get_shape() if hasattr(part, "get_shape") else part.shape  # type: ignore[attr-defined]
    return int(sizes[dimension])
