"""Decides which processes continue which nodes: roles and nodes -> Bundles. No Ray here.

A bundle holds the members of one role on one node; Ray reserves it as a whole. Members of a role are numbered consecutively
over the bundles, so that neighbors share a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.config.engine import EngineConfig
from fivefold.config.roles import Roles

RANKS = "ranks"


@dataclass(frozen=True)
class Amount:
    """Resources that a node has, or that a process takes."""

    gpus: int
    cpus: int

    def __mul__(self, count: int) -> Amount:
        return Amount(self.gpus * count, self.cpus * count)

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.gpus + other.gpus, self.cpus + other.cpus)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.gpus - other.gpus, self.cpus - other.cpus)

    def __floordiv__(self, other: Amount) -> int:
        """Returns how often the other amount fits into this one."""
        pairs = ((self.gpus, other.gpus), (self.cpus, other.cpus))
        return min((have // want for have, want in pairs if want), default=0)

    def __str__(self) -> str:
        kinds = [(self.gpus, "GPU"), (self.cpus, "CPU")]
        named = [f"{count} {kind}{'s' if count != 1 else ''}" for count, kind in kinds if count]
        return " and ".join(named) or "nothing"


@dataclass(frozen=True)
class Role:
    """Processes of one kind."""

    name: str
    count: int
    per_process: Amount
    together: int = 1
    """Number of neighbors that must share a node; divides `count`."""
    further: Amount = Amount(0, 0)
    """Additional resources for each group of neighbors, for processes that they start themselves."""

    @property
    def unit(self) -> Amount:
        """All resources that a group of neighbors takes."""
        return self.per_process * self.together + self.further


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    id: str
    host: str
    address: str
    total: Amount
    free: Amount
    """Resources that are not reserved."""

    def __str__(self) -> str:
        return self.host if self.host == self.address else f"{self.host} ({self.address})"


@dataclass(frozen=True)
class Bundle:
    """The members of a role that share a node."""

    role: Role
    members: range
    node: Node

    @property
    def amount(self) -> Amount:
        return self.role.unit * (len(self.members) // self.role.together)


def rank_role(roles: Roles, engine: EngineConfig, device: str, cpus: int, nodes: Sequence[Node]) -> Role:
    """Returns the role of a run's ranks on these nodes, with the number of ranks that must share a node.

    `roles`: the models of the run. `device`: trainer.device. `cpus`: CPUs of each rank.
    """
    world, policy = roles.world_size, roles["policy"].layout
    on_gpus = device == "cuda" or (device == "auto" and any(node.total.gpus for node in nodes))
    layouts = [policy, *roles.own_layouts.values()]
    together = math.lcm(*(size for layout in layouts for size in (layout.tp, layout.etp)))
    if any(role.first_rank % together for role in roles.models.values()) or world % together:
        # Groups of neighbors do not begin where the ranks of a node begin.
        together = world
    per_process, further = Amount(int(on_gpus), cpus), Amount(0, 0)
    if engine.layout is not None and engine.placement == "apart":
        # The ranks of a node start its servers, on the GPUs after their own, in a fixed ratio of servers to ranks.
        units = math.gcd(world, engine.layout.dp) if policy.world_size == world else 1
        together = math.lcm(together, world // units)
        further = per_process * (engine.layout.world_size * together // world)
    elif engine.is_server and not engine.url:
        # Ranks reach servers by a socket of the same machine.
        together = world
    elif engine.layout is not None:
        together = math.lcm(together, engine.layout.tp)
    return Role(RANKS, world, per_process, together, further)


def place(roles: Sequence[Role], nodes: Sequence[Node], spread: bool, hosts: int | None = None) -> list[Bundle] | None:
    """Places bundles of all roles into free resources of the nodes, the first role first; returns None if they do not fit.

    `spread`: as evenly as possible over all nodes; otherwise on as few as possible. `hosts`: on so many nodes, the same
    number on each.
    """
    free, bundles = {node.id: node.free for node in nodes}, []
    for role in roles:
        room = {node.id: free[node.id] // role.unit for node in nodes}
        units = role.count // role.together
        shares = (_spread if spread else _pack)(units, room) if hosts is None else _share(units, room, hosts)
        if shares is None:
            return None
        begin = 0
        for node in nodes:
            if units := shares.get(node.id, 0):
                members = range(begin, begin + units * role.together)
                bundles.append(Bundle(role, members, node))
                free[node.id] -= bundles[-1].amount
                begin = members.stop
    return bundles


def place_when_free(
    roles: Sequence[Role], nodes: Sequence[Node], spread: bool, hosts: int | None = None
) -> list[Bundle] | None:
    """Places bundles like `place`, as if no other run had reserved anything."""
    return place(roles, [replace(node, free=node.total) for node in nodes], spread, hosts)


def _pack(units: int, room: dict[str, int]) -> dict[str, int] | None:
    """Returns units for each node: the largest nodes are filled first, the rest fills the smallest node that holds it."""
    shares: dict[str, int] = {}
    while units:
        left = {node: count for node, count in room.items() if count and node not in shares}
        if not left:
            return None
        holding = [node for node, count in left.items() if count >= units]
        node = min(holding, key=left.__getitem__) if holding else max(left, key=left.__getitem__)
        shares[node] = min(units, left[node])
        units -= shares[node]
    return shares


def _spread(units: int, room: dict[str, int]) -> dict[str, int] | None:
    """Returns units for each node: each unit goes to the node that has the fewest."""
    shares = dict.fromkeys(room, 0)
    for _ in range(units):
        open_nodes = [node for node, count in room.items() if shares[node] < count]
        if not open_nodes:
            return None
        shares[min(open_nodes, key=shares.__getitem__)] += 1
    return shares


def _share(units: int, room: dict[str, int], hosts: int) -> dict[str, int] | None:
    """Returns units for each node: the same number on so many nodes, which are those with the least room for it."""
    share, rest = divmod(units, hosts)
    chosen = sorted((node for node, count in room.items() if count >= share), key=room.__getitem__)[:hosts]
    return dict.fromkeys(chosen, share) if share and not rest and len(chosen) == hosts else None


def needs(roles: Sequence[Role], hosts: int | None = None) -> str:
    """Returns the resources of all roles, as text for a message."""
    parts = []
    for role in roles:
        text = f"{role.count} {role.name} with {role.per_process} each"
        text += f", {role.together} neighbours on one node" if role.together > 1 else ""
        parts.append(text + (f" and {role.further} for their servers" if role.further != Amount(0, 0) else ""))
    return "; ".join(parts) + (f", on {hosts} node{'s' if hosts > 1 else ''} alike (launch.nodes)" if hosts else "")


def has(nodes: Sequence[Node]) -> str:
    """Returns the resources of each node, as text for a message."""
    return "; ".join(f"{node} has {node.total}, of which {node.free} free" for node in nodes) or "it has no node"


def listed(numbers: range) -> str:
    """Returns the members of a bundle as text: 4 or 0-3."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
