"""Devices that ranks compute on: this machine's GPUs, as far as they are known without torch, or other GPUs by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.config.gpus import GPUS
from fivefold.config.machine import elsewhere, is_joined, on_gpus, visible_gpus
from fivefold.config.schema import LaunchConfig

_SAME_MEMORY = 0.1
"""Largest relative difference in memory between GPUs that count as the same kind."""


@dataclass(frozen=True)
class Device:
    """Device of one rank, and the memory that the rank may fill."""

    name: str
    bytes: int


def device_of(config: RunConfig) -> Device | None:
    """Return the device of each rank: launch.gpu, a GPU of this machine or a share of the host; None if unknown."""
    if config.launch.gpu is not None:
        return Device(config.launch.gpu, int(GPUS[config.launch.gpu].memory_gib * 2**30))
    if elsewhere(config.launch):
        return None
    if on_gpus(config.launch, config.trainer.device):
        size = gpu_bytes()
        return None if size is None else Device("the GPU of this machine", size)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0) if is_joined(config.launch) else 0) or config.roles.world_size
    return Device("its share of this machine's memory", host_bytes() // ranks)


@cache
def gpu_bytes() -> int | None:
    """Return the bytes of this machine's smallest GPU; None if there is no GPU or its driver does not report them."""
    try:
        return min(int(line) for line in _asked("memory.total").split()) << 20
    except ValueError:
        return None


def gpu_kind(launch: LaunchConfig) -> str | None:
    """Return the GPU's name in the table of GPUs: launch.gpu, or this machine's GPU; None if unknown or not in the table."""
    if launch.gpu is not None or elsewhere(launch):
        return launch.gpu
    return local_gpu_kind()


def local_gpu_kind() -> str | None:
    """Return the table name of this machine's smallest GPU: the same model, with the nearest memory size."""
    gpu_name, size = _asked("name").lower().replace(" ", ""), gpu_bytes()
    if not gpu_name or size is None:
        return None
    # `NVIDIA H200`, `NVIDIA A100-SXM4-80GB`, `NVIDIA GeForce RTX 4090`
    alike = [name for name in GPUS if name.partition("-")[0] in gpu_name]
    near = [name for name in alike if abs(GPUS[name].memory_gib * 2**30 / size - 1) < _SAME_MEMORY]
    return max(near, key=len, default=None)


@cache
def _asked(field: str) -> str:
    """Return what the driver's tool prints, one line per GPU; empty if there is none."""
    if visible_gpus() == 0 or (tool := shutil.which("nvidia-smi")) is None:
        return ""
    query = [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def host_bytes() -> int:
    """Return the memory of this machine in bytes, or the container's limit if it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(total, int(limit.read_text()))
    except (OSError, ValueError):
        return total
