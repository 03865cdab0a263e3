"""Coordinates of the ranks of a run, and what they exchange about samples (over Gloo, on the host)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.groups import own_groups_only
from fivefold.distributed.heartbeat import Heartbeat
from fivefold.distributed.objects import all_gather_json, all_gather_rows, broadcast_json
from fivefold.errors import UserError
from fivefold.layout import ParallelLayout
from fivefold.layout.parallel import NOWHERE

T = TypeVar("T")


class Ranks:
    """This rank's coordinates in a layout and its host groups; one exists for each layout of a process.

    A layout may have fewer ranks than the run. On the other ranks the coordinates are `NOWHERE`: these ranks have no samples
    in the layout, and receive the results that all of its ranks share.
    """

    def __init__(self, layout: ParallelLayout, timeout_minutes: float, world_size: int | None = None) -> None:
        """`timeout_minutes`: longest wait for another rank; `world_size`: number of ranks of the run, if larger than this
        layout, whose ranks are then the first."""
        self.timeout = timedelta(minutes=timeout_minutes)
        self.heartbeat = Heartbeat()
        self.rank = dist.get_rank()
        with own_groups_only():
            self.world = self._group(list(range(dist.get_world_size())))
            wanted = world_size or layout.world_size
            if self.world.size() != wanted:
                raise UserError(f"layout {layout} needs {wanted} ranks: got {self.world.size()}")
            self._take(layout, 0)

    def on_layout(self, layout: ParallelLayout, first: int = 0) -> Ranks:
        """Returns the ranks of the same run in another layout, for a model with its own layout, starting at rank `first`."""
        other = copy.copy(self)
        with own_groups_only():
            other._take(layout, first)
        return other

    def _take(self, layout: ParallelLayout, first: int) -> None:
        """Find the place of this rank in the layout and create its groups."""
        world, end = self.world.size(), first + layout.world_size
        assert end <= world, f"{layout} from rank {first} on does not fit into {world} ranks"
        self.layout, self.first = layout, first
        self.holds = first <= self.rank < end
        """True if this rank is in the layout."""
        inside = [layout.coordinates(rank) for rank in range(layout.world_size)]
        everyone = [NOWHERE] * first + inside + [NOWHERE] * (world - end)
        self.coords = everyone[self.rank]

        def group_with_same(*names: str) -> dist.ProcessGroup:
            if not self.holds:
                return self._group([self.rank])
            same = [all(getattr(place, name) == getattr(self.coords, name) for name in names) for place in inside]
            return self._group([first + number for number, is_member in enumerate(same) if is_member])

        self.pp = group_with_same("tp", "cp", "dp")
        self.dp = group_with_same("tp", "cp", "pp")
        self.replica = group_with_same("dp")
        self.members = self.world
        """Group of all ranks of the layout; of this rank alone if it is not in the layout."""
        self._told: dist.ProcessGroup | None = None
        """Group of the layout's first rank and all ranks outside the layout."""
        if layout.world_size < world:
            self.members = self._group(list(range(first, end)) if self.holds else [self.rank])
            if self.leads or not self.holds:
                self._told = self._group([rank for rank in range(world) if rank == first or not first <= rank < end])
        self.dp_of_rank = torch.tensor([place.dp for place in everyone])
        """Replica of each rank of the world; -1 for ranks without one."""
        places = [place.tp + layout.tp * (place.cp + layout.cp * place.pp) for place in inside]
        self.place_of_rank = torch.full((world,), -1)
        """Number of each rank of the world within its replica; -1 for ranks without one."""
        self.place_of_rank[first:end] = torch.tensor(places)
        assert not self.holds or int(self.place_of_rank[self.rank]) == self.replica.rank()

    @property
    def is_main(self) -> bool:
        """True on the rank that writes the run's files and the terminal."""
        return self.rank == 0

    @property
    def is_everywhere(self) -> bool:
        """True if every rank of the run is in the layout."""
        return self.layout.world_size == self.world.size()

    @property
    def leads(self) -> bool:
        """True on the first rank of the layout."""
        return self.rank == self.first

    @property
    def turn(self) -> int:
        """Place of this rank when a list is dealt: the first rank of every replica, then the second of each, and so on."""
        return self.coords.dp + self.layout.dp * self.replica.rank()

    def shard(self, items: Sequence[T]) -> list[T]:
        """Returns this rank's part of `items`: the part of its replica, dealt to the ranks of the replica in turn."""
        return list(items[self.turn :: self.layout.world_size]) if self.holds else []

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return bool(self.all_reduce_max(float(flag)))

    def all_reduce_max(self, number: float) -> float:
        """Returns the largest number of all ranks."""
        self.heartbeat.begin()
        value = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.world)
        return float(value)

    def all_reduce_sum(self, sums: Tensor) -> Tensor:
        """Returns the sum of a host tensor over data-parallel replicas."""
        summed = sums.clone()
        dist.all_reduce(summed, group=self.dp)
        return self._tell(summed)

    def all_reduce_sum_world(self, numbers: list[float]) -> list[float]:
        """Returns the sum of each number over all ranks."""
        self.heartbeat.begin()
        summed = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(summed, group=self.world)
        return [float(number) for number in summed]

    def all_gather_world(self, rows_NF: Tensor) -> list[Tensor]:
        """Returns every rank's rows in order of ranks; the number of rows may differ."""
        self.heartbeat.begin()
        return all_gather_rows(rows_NF, self.world)

    def all_gather_replicas(self, rows_NF: Tensor) -> list[Tensor]:
        """Returns every replica's rows in order of replicas; the number of rows may differ."""
        rows = all_gather_rows(rows_NF, self.dp)
        if self._told is None:
            return rows
        counts = self._tell(torch.tensor([len(part) for part in rows]) if self.holds else torch.zeros(self.layout.dp).long())
        gathered = torch.cat(rows) if self.holds else rows_NF.new_empty(int(counts.sum()), *rows_NF.shape[1:])
        return list(self._tell(gathered).split(counts.tolist()))

    def all_gather_within_replica(self, rows_NF: Tensor) -> list[Tensor]:
        """Returns the rows of every rank of this replica in order of ranks; the number of rows may differ."""
        return all_gather_rows(rows_NF, self.replica)

    def all_to_all_replicas(self, rows_NF: Tensor, counts: list[int], expected: list[int]) -> Tensor:
        """Returns the rows that other replicas sent to this rank, in order of replicas: `expected[i]` rows from replica i.

        The first `counts[0]` rows of this rank go to replica 0, the next `counts[1]` to replica 1, and so on.
        """
        return _all_to_all(rows_NF, counts, expected, self.dp) if self.holds else rows_NF[:0]

    def all_to_all_world(self, rows_NF: Tensor, counts: list[int], expected: list[int]) -> Tensor:
        """Returns the rows that other ranks sent to this rank, in order of ranks: `expected[i]` rows from rank i.

        The first `counts[0]` rows of this rank go to rank 0, the next `counts[1]` to rank 1, and so on.
        """
        self.heartbeat.begin()
        return _all_to_all(rows_NF, counts, expected, self.world)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Returns every rank's bytes in order of ranks on the main rank, and an empty list on the others. Only the main rank
        receives them."""
        self.heartbeat.begin()
        sizes = torch.cat(all_gather_rows(torch.tensor([len(content)]), self.world)).tolist()
        if not self.is_main:
            if content:
                dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0, group=self.world)
            return []
        contents = [content]
        for rank, size in enumerate(sizes[1:], 1):
            arrived = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.recv(arrived, rank, group=self.world)
            contents.append(arrived.numpy().tobytes())
        return contents

    def gather_objects(self, value: T) -> list[T]:
        """Returns every rank's value on every rank: names and messages, never tokens. They are sent as JSON: tuples become
        lists."""
        self.heartbeat.begin()
        return all_gather_json(value, self.world)

    def broadcast_from_main(self, value: T | None) -> T:
        """Returns rank 0's value on every rank."""
        return self._broadcast(value, 0)

    def broadcast_from_leader(self, value: T | None) -> T:
        """Returns the value of the layout's first rank on every rank."""
        return self._broadcast(value, self.first)

    def _broadcast(self, value: T | None, source: int) -> T:
        self.heartbeat.begin()
        return broadcast_json(value, source, self.world)

    def barrier(self) -> None:
        self.heartbeat.begin()
        dist.barrier(group=self.world)

    def whole_group(self) -> dist.ProcessGroup:
        """Creates another group of all ranks."""
        with own_groups_only():
            return self._group(list(range(self.world.size())))

    def consecutive(self, size: int) -> dist.ProcessGroup | None:
        """Returns this rank's group when the layout is split into groups of `size` consecutive ranks.

        None if `size` is 1 or this rank is outside the layout.
        """
        if size == 1 or not self.holds:
            return None
        first = self.rank - (self.rank - self.first) % size
        with own_groups_only():
            return self._group(list(range(first, first + size)))

    def _tell(self, known: Tensor) -> Tensor:
        """Broadcasts a tensor that all ranks of the layout share to the ranks outside the layout."""
        if self._told is not None:
            dist.broadcast(known, self.first, group=self._told)
        return known

    def _group(self, members: list[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(members, backend="gloo", timeout=self.timeout)
        return group


def _all_to_all(rows_NF: Tensor, counts: list[int], expected: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows_NF.new_empty(sum(expected), *rows_NF.shape[1:])
    dist.all_to_all_single(received, rows_NF.contiguous(), expected, counts, group=group)
    return received
