"""Converters for each kind of sharding: full Hugging Face tensors <-> the shard of one tensor-parallel rank.

A full tensor is anything that can be sliced like one, so a rank reads only its own part from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.models.parameters import Sharding
from fivefold.models.spec import ModelSpec


class Sliceable(Protocol):
    """A tensor, or a tensor in a file."""

    def __getitem__(self, index: Any) -> Tensor: ...


class Sharder(Protocol):
    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        """Return the Megatron-Core parameter of tensor-parallel `rank` of `size`."""
        ...

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        """Return the Hugging Face tensors from the shards of all ranks."""
        ...


class Replicate:
    """Replicated: the same on every rank."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        return full[0][:]

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        return [shards[0]]


class Vocabulary:
    """Sharded by rows of the vocabulary, padded with zeros to `spec.padded_vocab`."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        rows = spec.padded_vocab // size
        begin, end = rank * rows, (rank + 1) * rows
        present = full[0][min(begin, spec.vocab) : min(end, spec.vocab)]
        if len(present) == rows:
            return present
        return torch.cat([present, present.new_zeros(rows - len(present), spec.hidden)])

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        return [torch.cat(list(shards))[: spec.vocab]]


class ColumnParallel:
    """Sharded by output dimension (mcore ColumnParallelLinear)."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        rows = _size(full[0], 0) // size
        return full[0][rank * rows : (rank + 1) * rows]

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        return [torch.cat(list(shards))]


class ColumnSwapped:
    """Sharded by output dimension, with the two halves of the input dimension swapped."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        return torch.cat(ColumnParallel().shard(full, rank, size, spec).chunk(2, dim=1)[::-1], dim=1)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        return [torch.cat(torch.cat(list(shards)).chunk(2, dim=1)[::-1], dim=1)]


class RowParallel:
    """Sharded by input dimension (mcore RowParallelLinear)."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        width = _size(full[0], 1) // size
        return full[0][:, rank * width : (rank + 1) * width]

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        return [torch.cat(list(shards), dim=1)]


class GateUp:
    """Gate and up, sharded by output dimension and stacked as [gate; up] in each shard."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        rows = _size(full[0], 0) // size
        return torch.cat([part[rank * rows : (rank + 1) * rows] for part in full])

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves])]


class QKV:
    """Query, key and value interleaved by query group: its queries, its key, its value; weights and biases alike."""

    def shard(self, full: Sequence[Sliceable], rank: int, size: int, spec: ModelSpec) -> Tensor:
        groups = spec.kv_heads // size
        parts = []
        for part, per_group in zip(full, self._rows(spec), strict=True):
            rows = groups * per_group
            shard = part[rank * rows : (rank + 1) * rows]
            parts.append(shard.reshape(groups, per_group, *shard.shape[1:]))
        stacked = torch.cat(parts, dim=1)
        return stacked.reshape(-1, *stacked.shape[2:])

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> list[Tensor]:
        together = torch.cat(list(shards))
        grouped = together.reshape(spec.kv_heads, -1, *together.shape[1:])
        return [part.reshape(-1, *together.shape[1:]) for part in grouped.split(self._rows(spec), dim=1)]

    @staticmethod
    def _rows(spec: ModelSpec) -> list[int]:
        return [spec.heads // spec.kv_heads * spec.head_dim, spec.head_dim, spec.head_dim]


SHARDERS: dict[Sharding, Sharder] = {
    Sharding.REPLICATE: Replicate(),
    Sharding.COLUMN: ColumnParallel(),
    Sharding.COLUMN_SWAPPED: ColumnSwapped(),
    Sharding.ROW: RowParallel(),
    Sharding.VOCABULARY: Vocabulary(),
    Sharding.QKV: QKV(),
    Sharding.GATE_UP: GateUp(),
}


def _size(part: Sliceable, dimension: int) -> int:
    # Tensors in a file (safetensors) have get_shape, tensors in memory have shape.
    sizes = part.get_shape() if hasattr(part, "get_shape") else part.shape  # type: ignore[attr-defined]
    return int(sizes[dimension])
