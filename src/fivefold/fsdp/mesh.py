"""Process groups of an `fsdp:` layout: Ranks -> Mesh.

Ranks are numbered as in every layout: tensor fastest, then context, then data. Parameters are sharded over data and context
together. With replicas, the data-parallel ranks fall into groups of neighbors, each with a whole copy. Experts are divided
over the tensor-parallel ranks of one or, with e, several neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.distributed.groups import own_groups_only
from fivefold.distributed.ranks import Ranks
from fivefold.layout import Coordinates, ParallelLayout


@dataclass(frozen=True)
class Split:
    """How ranks hold one parameter, before FSDP shards what each of them holds."""

    dim: int | None = None
    """Dimension that is split over tensor-parallel ranks; None: each of them holds all of it."""
    is_summed: bool = False
    """Whether each tensor-parallel rank has only a part of its gradient."""
    by_expert: bool = False
    """Whether its first dimension, the experts, is split over the ranks that divide experts."""


@dataclass(frozen=True)
class Mesh:
    """The process groups of this rank in one layout."""

    ranks: Ranks
    device: torch.device
    replicas: int
    """Number of whole copies of the model."""
    shard: dist.ProcessGroup
    """Ranks that together hold one copy of what this rank holds a part of."""
    copies: dist.ProcessGroup
    """Ranks that hold the same shards."""
    cp: dist.ProcessGroup
    tp: dist.ProcessGroup
    one_copy: dist.ProcessGroup
    """Ranks that together hold the whole model once."""
    fsdp: DeviceMesh
    """The mesh that FSDP shards over, with a dimension for copies if there are several."""
    experts: dist.ProcessGroup
    """Ranks that divide experts among them: each holds whole ones."""
    tokens: dist.ProcessGroup
    """Ranks of `experts` that have other tokens than this one, and this one."""
    expert_shard: dist.ProcessGroup
    """Ranks that together hold one copy of the experts of which this rank holds a part."""
    expert_fsdp: DeviceMesh
    """The mesh that FSDP shards experts over."""

    @property
    def layout(self) -> ParallelLayout:
        return self.ranks.layout

    def split_over(self, split: Split) -> dist.ProcessGroup:
        """Return the ranks that a parameter of this split is divided over."""
        return self.experts if split.by_expert else self.tp

    def sharded_over(self, split: Split) -> dist.ProcessGroup:
        """Return the ranks over which FSDP shards what each of `split_over` holds."""
        return self.expert_shard if split.by_expert else self.shard


def build_mesh(ranks: Ranks, device: torch.device, replicas: int = 1) -> Mesh:
    """Create the groups of the layout of `ranks`, within the running process group."""
    layout, coords = ranks.layout, ranks.coords
    per_copy, neighbors = layout.dp // replicas, max(1, layout.ep // layout.tp)
    assert layout.dp == replicas * per_copy, f"{replicas} replicas do not divide d{layout.dp}"
    assert per_copy % neighbors == 0, f"e{layout.ep} does not divide a copy of {per_copy * layout.tp} ranks"
    places = {ranks.first + rank: layout.coordinates(rank) for rank in range(layout.world_size)}

    def tp(place: Coordinates) -> int:
        return place.tp

    def cp(place: Coordinates) -> int:
        return place.cp

    def copy(place: Coordinates) -> int:
        return place.dp // per_copy

    def part(place: Coordinates) -> int:
        return place.dp % per_copy

    def block(place: Coordinates) -> int:
        """Neighboring ranks over which the experts are divided."""
        return place.dp // neighbors

    def inside(place: Coordinates) -> int:
        return place.dp % neighbors

    def alike(*same: Callable[[Coordinates], int]) -> list[int]:
        """Return the ranks that have these coordinates in common with this one."""
        return [rank for rank, place in places.items() if all(key(place) == key(coords) for key in same)]

    def group(*same: Callable[[Coordinates], int]) -> dist.ProcessGroup:
        created: dist.ProcessGroup = dist.new_group(alike(*same), timeout=ranks.timeout)
        return created

    with own_groups_only():
        shard, copies = group(tp, copy), group(tp, cp, part)
        contexts, tensors, whole = group(tp, copy, part), group(cp, copy, part), group(copy)
        experts, tokens = group(cp, block), group(cp, block, tp)
        expert_shard = shard if neighbors == 1 else group(copy, tp, inside)

    def device_mesh(sharded: dist.ProcessGroup, *same: Callable[[Coordinates], int]) -> DeviceMesh:
        if replicas == 1:
            return DeviceMesh.from_group(sharded, device.type, mesh_dim_names=("shard",))
        rows = [[rank for rank in alike(*same) if copy(places[rank]) == number] for number in range(replicas)]
        return DeviceMesh.from_group(
            [copies, sharded], device.type, mesh=torch.tensor(rows), mesh_dim_names=("copy", "shard")
        )

    return Mesh(
        ranks,
        device,
        replicas,
        shard,
        copies,
        contexts,
        tensors,
        whole,
        device_mesh(shard, tp),
        experts,
        tokens,
        expert_shard,
        device_mesh(expert_shard, tp, inside),
    )
