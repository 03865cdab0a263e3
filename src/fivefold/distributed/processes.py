"""Ending processes together with those that they started, and with the shared memory that they hold."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps it, not a file of ours
_BLOCK = re.compile(r"(psm_|torch_|sem\.mp-)[^ ]*|[^ ]*-cpushm_\d+")
"""Names that Python, torch, and vLLM on CPUs give."""
_LONGEST_END = 20.0
"""Seconds: a process that waits for a driver or a disk ends late."""


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
    """End them, as far as they are still there, and return when they hold nothing any more.

    A signal only asks for it: what a process has on a device is there until it is gone, and would be missing to the next.
    """
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    deadline = time.monotonic() + _LONGEST_END
    while any(map(_is_there, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def shared_memory_of(pid: int) -> set[str]:
    """Names of the blocks that a process maps; nothing where it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {name for line in lines if _BLOCK.fullmatch(name := line.partition(f"{_SHARED_MEMORY}/")[2])}
    return set()


def unname_shared_memory(pid: int, prefix: str = "") -> None:
    """Take away the names of a process's blocks that begin so.

    A block lives as long as a process maps it; with a name it would outlive processes that are killed.
    """
    for name in shared_memory_of(pid):
        if name.startswith(prefix):
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
