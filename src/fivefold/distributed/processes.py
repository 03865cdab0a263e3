"""Ends processes together with their children and the shared memory that they hold."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps it, not a file of ours
_BLOCK = re.compile(r"(psm_|torch_|sem\.mp-|(sem\.)?fivefold-)[^ ]*|[^ ]*-cpushm_\d+")
"""Names that Python, torch, vLLM on CPUs, and `name_shared_memory` give to blocks of shared memory."""
_LONGEST_END = 20.0
"""Longest time in seconds to wait for a killed process: one that waits for a driver or a disk ends late."""


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Returns all child processes of a process, recursively, except Python's trackers of shared memory.

    A tracker ends after all the processes that it tracks for, and then removes what they left.
    """
    processes = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in word for word in child.cmdline()):
                processes.append(child)
    return processes


def kill(processes: list[psutil.Process]) -> None:
    """Kill the processes that still run, and return when they have ended.

    A signal alone is not enough: a process holds its device memory until it has ended, and the next process would lack that
    memory.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _LONGEST_END
    while any(map(_is_there, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def shared_memory_of(pid: int) -> set[str]:
    """Returns the names of the shared memory blocks that a process maps; an empty set if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {name for line in lines if _BLOCK.fullmatch(name := line.partition(f"{_SHARED_MEMORY}/")[2])}
    return set()


def unname_shared_memory(pid: int, prefix: str = "") -> None:
    """Unlink the names of a process's shared memory blocks that begin with `prefix`.

    A block lives as long as a process maps it. With a name it would outlive processes that are killed.
    """
    for name in shared_memory_of(pid):
        if name.startswith(prefix):
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
