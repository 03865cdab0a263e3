"""Removes what is left of a cluster of this machine after its run has ended, in whatever way.

Usage: `python -m fivefold.launch.ray.guardian DIRECTORY`, with the reading end of a pipe of the run as standard input. Ray's
own processes notice the end of their starter too, but some of them only after a minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import psutil

from fivefold.distributed.processes import kill


def main() -> None:
    directory, spared = sys.argv[1], (os.getpid(), os.getppid())
    sys.stdin.read()
    while left := [process for process in psutil.process_iter() if process.pid not in spared and _is_of(process, directory)]:
        kill(left)
    shutil.rmtree(directory, ignore_errors=True)


def _is_of(process: psutil.Process, directory: str) -> bool:
    """Returns whether the process was started with the directory, or has a file in it open: each Ray process has its log
    there."""
    with contextlib.suppress(psutil.Error, OSError):
        files = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        started = any(directory in word for word in process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and (started or any(f"{directory}/" in file for file in files))
    return False


if __name__ == "__main__":
    main()
