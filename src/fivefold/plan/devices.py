"""The GPUs of this machine, as far as they are known without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from fivefold.config import RunConfig


def on_gpus(config: RunConfig) -> bool:
    """The run will use GPUs."""
    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and visible_gpus() > 0)


def visible_gpus() -> int:
    """GPUs of this machine that the run may use."""
    found = Path("/proc/driver/nvidia/gpus")
    gpus = len(list(found.glob("*"))) if found.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else min(gpus, len([item for item in visible.split(",") if item.strip()]))


@cache
def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine; None where it has none or its driver does not say."""
    if visible_gpus() == 0 or (tool := shutil.which("nvidia-smi")) is None:
        return None
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in answer.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
