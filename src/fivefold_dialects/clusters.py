"""Find the keys by which other systems run on several machines; with them we set `launch.backend: ray`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold_dialects.device_mapping import parse_devices
from fivefold_dialects.source import Source, UnreadableError

KEY = "launch.backend"
WITH_JUDGE = (
    "runs on several machines, and here Ray does not start the servers of a judge: start the run with torchrun, or set "
    "reward.judge.url to servers that already run, and launch.backend: ray"
)


@dataclass(frozen=True)
class Cluster:
    """Keys by which a system's configuration asks for several machines."""

    nodes: tuple[str, ...] = ()
    """Keys with a number of machines; above 1 the run uses Ray."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Key -> the value with which it chooses Ray."""
    devices: str = ""
    """Suffix of keys that list GPUs of all machines; the run uses Ray if one is not on the first machine."""
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
"""System -> the keys by which it asks for several machines."""


def keys_for_ray(source: Source, system: str) -> list[str]:
    """Return the keys that ask for Ray; empty if torchrun or another launcher has started this process as a rank."""
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
    """Return a number, or 0 if the value is absent or wrong; another function reports a wrong value."""
    with contextlib.suppress(UnreadableError):
        return source.whole(key) or 0
    return 0


def _last(source: Source, key: str) -> int:
    with contextlib.suppress(ValueError):
        return max(parse_devices(source.raw(key)), default=-1)
    return -1
