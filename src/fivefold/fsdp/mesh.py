"""Process groups of an `fsdp:` layout: Ranks -> Mesh.

Ranks are numbered as in every layout: tensor fastest, then context, then data. Parameters are sharded over data and context
together. With replicas, the data-parallel ranks fall into groups of neighbors, each with a whole copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.distributed.groups import own_groups_only
from fivefold.distributed.ranks import Ranks
from fivefold.layout import ParallelLayout


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

    @property
    def layout(self) -> ParallelLayout:
        return self.ranks.layout


def build_mesh(ranks: Ranks, device: torch.device, replicas: int = 1) -> Mesh:
    """Create the groups of the layout of `ranks`, within the running process group."""
    layout, coords = ranks.layout, ranks.coords
    per_copy = layout.dp // replicas
    assert layout.dp == replicas * per_copy, f"{replicas} replicas do not divide d{layout.dp}"
    places = {ranks.first + rank: layout.coordinates(rank) for rank in range(layout.world_size)}

    def group(**same: bool) -> dist.ProcessGroup:
        """Create the group of the ranks that share these coordinates with this one."""
        members = [
            rank
            for rank, place in places.items()
            if (not same.get("tp") or place.tp == coords.tp)
            and (not same.get("cp") or place.cp == coords.cp)
            and (not same.get("copy") or place.dp // per_copy == coords.dp // per_copy)
            and (not same.get("part") or place.dp % per_copy == coords.dp % per_copy)
        ]
        created: dist.ProcessGroup = dist.new_group(members, timeout=ranks.timeout)
        return created

    with own_groups_only():
        shard, copies = group(tp=True, copy=True), group(tp=True, cp=True, part=True)
        cp, tp = group(tp=True, copy=True, part=True), group(cp=True, copy=True, part=True)
        one_copy = group(copy=True)
    if replicas == 1:
        fsdp = DeviceMesh.from_group(shard, device.type, mesh_dim_names=("shard",))
    else:
        rows = [
            [rank for rank, place in places.items() if place.tp == coords.tp and place.dp // per_copy == copy]
            for copy in range(replicas)
        ]
        fsdp = DeviceMesh.from_group([copies, shard], device.type, mesh=torch.tensor(rows), mesh_dim_names=("copy", "shard"))
    return Mesh(ranks, device, replicas, shard, copies, cp, tp, one_copy, fsdp)
