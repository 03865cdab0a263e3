"""Process groups, of which each rank creates only its own: no rank waits for groups that it is not in."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d

_made: Counter[str] = Counter()
"""Number of groups that this process has created, by their members."""


@contextmanager
def own_groups_only() -> Iterator[None]:
    """Within this context, each rank creates only the process groups it belongs to.

    By default torch synchronizes all ranks of the world for each group, and Megatron-Core creates each group of each
    dimension on each rank: 3,000 synchronizations of 1,024 ranks for d32t4p4c2e8. Groups that contain only this rank are
    created once, not once per dimension.
    """
    make, alone = dist.new_group, {}

    def new_group(ranks: list[int] | None = None, *arguments: Any, **named: Any) -> Any:
        if ranks is None:
            return make(ranks, *arguments, **named)
        if dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        if len(ranks) > 1:
            return make(ranks, *arguments, **named | {"use_local_synchronization": True})
        key = named.get("backend")
        if key not in alone:
            alone[key] = make(ranks, *arguments, **named | {"use_local_synchronization": True})
        return alone[key]

    # torch names such a group after its members and the number of all groups in this process. That number differs among
    # pipeline stages, so the members would wait for each other under two names.
    with patch.object(dist, "new_group", new_group), patch.object(distributed_c10d, "_process_group_name", _name):
        yield


@contextmanager
def as_world(members: dist.ProcessGroup) -> Iterator[None]:
    """Within this context, `get_world_size()` and `all_gather_object()` act on `members` instead of the world.

    Megatron-Core derives its groups from the world size, and synchronizes an optimizer's parameters over the whole world.
    """
    count, gather = dist.get_world_size, dist.all_gather_object  # noqa: TID251 - Megatron-Core's

    def size(group: dist.ProcessGroup | None = None) -> int:
        return count(group or members)

    def objects(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
        gather(object_list, obj, group or members)

    with patch.object(dist, "get_world_size", size), patch.object(dist, "all_gather_object", objects):
        yield


def _name(ranks: list[int], use_hashed_name: bool) -> str:
    members = ",".join(map(str, ranks))
    _made[members] += 1
    return f"{hashlib.sha256(members.encode()).hexdigest()}-{_made[members]}"
