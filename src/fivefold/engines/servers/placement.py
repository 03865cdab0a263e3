"""Places servers on separate GPUs: which rank starts which server, and where. No torch: `fivefold check` uses it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.errors import UserError
from fivefold.layout import ParallelLayout


@dataclass(frozen=True)
class Machine:
    """A machine of a run."""

    ranks: Sequence[int]
    """Ranks of the world on this machine; each has the GPU of its number on the machine."""
    gpus: int | None
    """Number of its GPUs; None if servers are processes without GPUs."""
    starters: Sequence[int]
    """Ranks of this machine that hold the policy: they start servers, and send weights to them."""
    taken: int = 0
    """Number of GPUs after those of the ranks that other servers already use."""

    @property
    def first(self) -> int:
        """The first unused GPU."""
        return len(self.ranks) + self.taken

    def room(self, gpus_each: int) -> int | None:
        """Returns the number of servers for which there are unused GPUs; None if servers need none."""
        if not self.starters:
            return 0
        return None if self.gpus is None else max(0, self.gpus - self.first) // gpus_each


@dataclass(frozen=True)
class ServerPlace:
    """Where one server of an engine runs."""

    number: int
    machine: int
    rank: int
    """The rank that starts it."""
    first_gpu: int | None
    """The first of its GPUs, which are consecutive."""


def machines_of(hosts: Sequence[str], gpus: Sequence[int | None], policy: range) -> list[Machine]:
    """Returns the machines of a run, from the host of each rank and the number of GPUs it sees; `policy`: the policy's
    ranks."""
    machines = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        machines.append(Machine(ranks, gpus[ranks[0]], [rank for rank in ranks if rank in policy]))
    return machines


def place_servers(layout: ParallelLayout, machines: Sequence[Machine]) -> list[ServerPlace]:
    """Returns the places of an engine's replicas, spread evenly over the machines; raises ValueError if GPUs are missing.

    On a machine the servers use consecutive GPUs after those of the ranks, and its ranks start them in turn.
    """
    rooms = [machine.room(layout.tp) for machine in machines]
    counts = [0] * len(machines)
    for _ in range(layout.dp):
        free = [place for place, room in enumerate(rooms) if room is None or counts[place] < room]
        if not free:
            raise UserError(_too_few(layout, machines))
        counts[min(free, key=counts.__getitem__)] += 1
    places: list[ServerPlace] = []
    for place, (machine, count) in enumerate(zip(machines, counts, strict=True)):
        for index in range(count):
            first = None if machine.gpus is None else machine.first + index * layout.tp
            places.append(ServerPlace(len(places), place, machine.starters[index % len(machine.starters)], first))
    return places


def after_servers(machines: Sequence[Machine], layout: ParallelLayout) -> list[Machine]:
    """Returns the machines with the GPUs of this layout's servers marked as taken; raises ValueError if there are too
    few."""
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
    present = f"the machine has {has}" if len(machines) == 1 else f"its {len(machines)} machines have {has}"
    return (
        f"{layout} apart needs {layout.world_size} GPUs after those of the ranks, {layout.tp} for each server on one "
        f"machine: {present}; lower it, share the ranks' GPUs (colocated), or start servers elsewhere (engine.url)"
    )
