"""Ending processes together with those that they started."""

from __future__ import annotations

import contextlib

import psutil


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
