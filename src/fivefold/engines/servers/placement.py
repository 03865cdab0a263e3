"""Servers on GPUs of their own: which rank starts which of them, and where. No torch: `fivefold check` asks too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.layout import ParallelLayout


@dataclass(frozen=True)
class Machine:
    """A machine of a run."""

    ranks: Sequence[int]
    """Those of the world that are on it; each has the GPU of its number on the machine."""
    gpus: int | None
    """How many it has; None where servers are processes without GPUs."""
    starters: Sequence[int]
    """Those of its ranks that hold the policy: they start servers, and give them weights."""
    taken: int = 0
    """Of those behind the ranks' the first ones, which other servers have."""

    @property
    def first(self) -> int:
        """The first GPU that nobody has."""
        return len(self.ranks) + self.taken

    def room(self, gpus_each: int) -> int | None:
        """Servers for which there are GPUs behind those of the ranks."""
        if not self.starters:
            return 0
        return None if self.gpus is None else max(0, self.gpus - self.first) // gpus_each


@dataclass(frozen=True)
class ServerPlace:
    """Where one server of an engine is."""

    number: int
    machine: int
    rank: int
    """The rank that starts it."""
    first_gpu: int | None
    """Of those that it has, which follow each other."""


def machines_of(hosts: Sequence[str], gpus: Sequence[int | None], policy: range) -> list[Machine]:
    """The machines of a run, of whose ranks each says its host and how many GPUs it sees there; `policy`: its ranks."""
    found = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        found.append(Machine(ranks, gpus[ranks[0]], [rank for rank in ranks if rank in policy]))
    return found


def place_servers(layout: ParallelLayout, machines: Sequence[Machine]) -> list[ServerPlace]:
    """The places of an engine's replicas, spread evenly over the machines; raises ValueError where GPUs are missing.

    On a machine the servers come one after the other behind the GPUs of the ranks, and its ranks start them in turn.
    """
    rooms = [machine.room(layout.tp) for machine in machines]
    counts = [0] * len(machines)
    for _ in range(layout.dp):
        free = [place for place, room in enumerate(rooms) if room is None or counts[place] < room]
        if not free:
            raise ValueError(_too_few(layout, machines))
        counts[min(free, key=counts.__getitem__)] += 1
    places: list[ServerPlace] = []
    for place, (machine, count) in enumerate(zip(machines, counts, strict=True)):
        for index in range(count):
            first = None if machine.gpus is None else machine.first + index * layout.tp
            places.append(ServerPlace(len(places), place, machine.starters[index % len(machine.starters)], first))
    return places


def behind(machines: Sequence[Machine], layout: ParallelLayout) -> list[Machine]:
    """The machines with the GPUs taken that the servers of a layout have; raises ValueError where there are too few."""
    places = place_servers(layout, machines)
    counts = [sum(place.machine == number for place in places) for number in range(len(machines))]
    return [
        replace(machine, taken=machine.taken + layout.tp * count) for machine, count in zip(machines, counts, strict=True)
    ]


def _too_few(layout: ParallelLayout, machines: Sequence[Machine]) -> str:
    others = sum(machine.taken for machine in machines)
    has = ", ".join(
        f"{machine.gpus} GPUs for {len(machine.ranks)} ranks" + ("" if machine.starters else " without the policy")
        for machine in machines
    )
    has += f" and {others} for other servers" if others else ""
    found = f"the machine has {has}" if len(machines) == 1 else f"its {len(machines)} machines have {has}"
    return (
        f"{layout} apart needs {layout.world_size} GPUs behind those of the ranks, {layout.tp} for each server on one "
        f"machine: {found}; lower it, share the ranks' GPUs (colocated), or start servers elsewhere (engine.url)"
    )
