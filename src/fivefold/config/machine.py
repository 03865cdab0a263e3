"""Where a run computes, as far as the configuration and this machine's device files say. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fivefold.config.schema import LaunchConfig

_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia/gpus")


def is_joined(launch: LaunchConfig) -> bool:
    """Return whether torchrun or another launcher started this process as a rank."""
    return launch.backend == "auto" and "WORLD_SIZE" in os.environ and not is_node_of_job()


def is_node_of_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether RANK and WORLD_SIZE count hosts, as a PyTorchJob sets them next to PET_* for torchrun to read."""
    return "PET_NNODES" in environment and "LOCAL_RANK" not in environment


def hosts(launch: LaunchConfig, gpus: int) -> int | None:
    """Return the number of hosts that launch.nodes, or launch.gpus_per_node, requests; `gpus` is what the layouts take."""
    if launch.nodes is None and launch.gpus_per_node is not None:
        return -(-gpus // launch.gpus_per_node)
    return launch.nodes


def elsewhere(launch: LaunchConfig) -> bool:
    """Return whether the ranks run on nodes of a Ray cluster, which may be other machines than this one."""
    return launch.backend == "ray" and bool(launch.ray.address or os.environ.get("RAY_ADDRESS"))


def on_gpus(launch: LaunchConfig, device: str) -> bool:
    """Return whether the run will use GPUs; `device` is trainer.device."""
    if device != "auto":
        return device == "cuda"
    return launch.gpu is not None or visible_gpus() > 0


def visible_gpus() -> int:
    """Return the number of this machine's GPUs that the run may use."""
    # In a container, count the GPUs that it was given: a node's driver may create the device files at their first use.
    devices = [path for path in _DEVICES.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    gpus = len(devices or list(_DRIVER.glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else min(gpus, len([item for item in visible.split(",") if item.strip()]))
