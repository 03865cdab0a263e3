"""Runs of several machines: how other systems ask for them -> `launch.backend: ray`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold_dialects.device_mapping import parse_devices
from fivefold_dialects.source import Source, UnreadableError

KEY = "launch.backend"
WITH_JUDGE = (
    "runs on several machines, where Ray does not place a judge's servers here: start it by torchrun, or name servers that "
    "run already in reward.judge.url and set launch.backend: ray"
)


@dataclass(frozen=True)
class Cluster:
    """The keys by which a configuration asks for a cluster; what is left out asks for none."""

    nodes: tuple[str, ...] = ()
    """Numbers of machines: Ray above 1."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Key -> its value that names Ray."""
    devices: str = ""
    """End of keys that list GPUs over all machines: Ray where one of them is beyond the first machine."""
    gpus_per_node: str = ""


CLUSTERS = {
    "verl": Cluster(("trainer.nnodes", "rollout.nnodes", "actor_rollout_ref.rollout.nnodes")),
    "siiRL": Cluster(("trainer.nnodes",)),
    "Trinity-RFT": Cluster(("cluster.node_num",)),
    "ROLL": Cluster(("num_nodes",), devices=".device_mapping", gpus_per_node="num_gpus_per_node"),
    "AReaL": Cluster(("cluster.n_nodes", "n_nodes"), {"scheduler.type": "ray", "mode": "ray"}),
    "SkyRL": Cluster(("trainer.placement.policy_num_nodes", "placement.num_nodes")),
    "TRL": Cluster(("num_machines", "nnodes", "accelerate.num_machines")),
}
"""System -> how it asks for several machines."""


def keys_for_ray(source: Source, system: str) -> list[str]:
    """The keys that ask for Ray; none where this process is a rank that torchrun or another launcher has started."""
    if {"RANK", "WORLD_SIZE"} <= set(source.environment):
        return []
    asks = CLUSTERS.get(system, Cluster())
    found = [key for key in asks.nodes if key in source.settings and _number(source, key) > 1]
    found += [key for key, name in asks.chosen.items() if key in source.settings and source.text(key) == name]
    if asks.devices:
        per_node = _number(source, asks.gpus_per_node)
        found += [key for key in source.settings if key.endswith(asks.devices) and _last(source, key) >= per_node]
    return found


def _number(source: Source, key: str) -> int:
    """A number, or 0 where there is none: another function says what is wrong with it."""
    with contextlib.suppress(UnreadableError):
        return source.whole(key) or 0
    return 0


def _last(source: Source, key: str) -> int:
    with contextlib.suppress(ValueError):
        return max(parse_devices(source.raw(key)), default=-1)
    return -1
