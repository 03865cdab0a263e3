"""Ending processes together with those that they started."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps it, not a file of ours
_BLOCK = re.compile(r"(psm_|torch_|sem\.mp-)[^ ]*|[^ ]*-cpushm_\d+")
"""Names that Python, torch, and vLLM on CPUs give."""


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Everything that a process started, but for Python's trackers of shared memory.

    A tracker ends when all that it tracks for have ended, and then removes what they left.
    """
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in word for word in each.cmdline()):
                found.append(each)
    return found


def kill(processes: list[psutil.Process]) -> None:
    """End them at once, as far as they are still there."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def shared_memory_of(pid: int) -> set[str]:
    """Names of the blocks that a process maps; nothing where it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {name for line in lines if _BLOCK.fullmatch(name := line.partition(f"{_SHARED_MEMORY}/")[2])}
    return set()


def unname_shared_memory(pid: int) -> None:
    """A block lives as long as a process maps it; with a name it would outlive processes that are killed."""
    for name in shared_memory_of(pid):
        (_SHARED_MEMORY / name).unlink(missing_ok=True)
