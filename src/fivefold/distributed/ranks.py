"""Who is who among the ranks of a run, and what they tell each other about samples (over Gloo, on the host)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fivefold.layout import ParallelLayout

T = TypeVar("T")


class Ranks:
    """This rank's place in a layout and its host groups; one exists a process."""

    def __init__(self, layout: ParallelLayout) -> None:
        if dist.get_world_size() != layout.world_size:
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks: got {dist.get_world_size()}")
        self.layout = layout
        self.rank = dist.get_rank()
        self.coords = layout.coordinates(self.rank)
        tps, cps, dps, pps = range(layout.tp), range(layout.cp), range(layout.dp), range(layout.pp)
        self.world = self._group([list(range(layout.world_size))])
        self.pp = self._group([self._with(tp=tp, cp=cp, dp=dp) for tp in tps for cp in cps for dp in dps])
        self.dp = self._group([self._with(tp=tp, cp=cp, pp=pp) for tp in tps for cp in cps for pp in pps])
        self.replica = self._group([self._with(dp=dp) for dp in dps])

    @property
    def is_main(self) -> bool:
        """The rank that talks to the user and writes the run's files."""
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> tuple[list[T], list[T]]:
        """(this replica's part of `items`, the part of it that this rank works on), both in order.

        Item i belongs to replica i mod dp, so every consecutive piece of the items is spread evenly.
        """
        replica = list(items[self.coords.dp :: self.layout.dp])
        return replica, replica[self.replica.rank() :: self.layout.replica_size]

    def all_gather_within_replica(self, items: list[T]) -> list[T]:
        """The parts that `shard` gave to the ranks of this replica, together again and in order."""
        parts: list[list[T]] = [[]] * self.layout.replica_size
        dist.all_gather_object(parts, items, group=self.replica)
        return _interleave(parts)

    def all_gather_replicas(self, items: list[T]) -> list[T]:
        """One entry for each item of a replica, on every replica, together again and in order on every rank."""
        parts: list[list[T]] = [[]] * self.layout.dp
        dist.all_gather_object(parts, items, group=self.dp)
        return _interleave(parts)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.world)
        return bool(value)

    def all_reduce_max(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        value = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.world)
        return float(value)

    def all_reduce_sum(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum over data-parallel replicas of a tensor on the host."""
        summed = sums.clone()
        dist.all_reduce(summed, group=self.dp)
        return summed

    def all_reduce_sum_world(self, numbers: list[float]) -> list[float]:
        """The sum of each number over all ranks."""
        summed = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(summed, group=self.world)
        return summed.tolist()

    def all_gather_world(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        values: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(values, value, group=self.world)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.world)

    def broadcast_from_main(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, 0, group=self.world)
        return box[0]  # type: ignore[no-any-return]

    def _with(self, **fixed: int) -> list[int]:
        """Ranks whose coordinates have these values."""
        places = ((rank, self.layout.coordinates(rank)) for rank in range(self.layout.world_size))
        return [rank for rank, place in places if all(getattr(place, name) == value for name, value in fixed.items())]

    def _group(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """This rank's Gloo group among `groups`, which cover all ranks."""
        own: dist.ProcessGroup | None = None
        for members in groups:
            group: dist.ProcessGroup = dist.new_group(members, backend="gloo")
            if self.rank in members:
                own = group
        assert own is not None
        return own


def _interleave(parts: list[list[T]]) -> list[T]:
    """Undo `items[0::n], items[1::n], ...`."""
    together: list[T] = []
    for i in range(max((len(part) for part in parts), default=0)):
        together += [part[i] for part in parts if i < len(part)]
    return together
