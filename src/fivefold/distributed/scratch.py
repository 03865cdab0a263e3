"""Temporary directories that are removed after their process has ended, even if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import re
import shutil
import tempfile
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import psutil

_NAME = re.compile(r"fivefold-(\d+)-.+")
_LONGEST = 40
"""Most characters in the path of the parent directory. The path of a socket in one of our directories may have 107
characters; a name given by other libraries takes 37 of them."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps it, not a file of ours
_RANDOM = 8
"""Random characters in the name of a block of shared memory."""


def scratch_directory() -> Path:
    """Creates a directory for this process and its children, with a path that is short enough for sockets.

    Directories left by processes that have ended are removed.
    """
    for path, owner in _owned_directories():
        if _has_ended(owner) and _is_free(path):
            _remove(path)
    path = Path(tempfile.mkdtemp(prefix=f"fivefold-{os.getpid()}-", dir=_short_directory()))
    # The lock lasts until this process ends. A process id alone is not enough: it means nothing in another container.
    fcntl.flock(os.open(path, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
    return path


def remove_scratch(pid: int) -> None:
    """Remove the directories of a process that has ended, or is about to end."""
    for path, owner in _owned_directories():
        if owner == pid:
            _remove(path)


def name_shared_memory(directory: Path) -> None:
    """Name the semaphores and the shared memory that Python's multiprocessing creates from now on after a scratch directory.

    They are removed with it, even if Python's tracker was killed with the processes that it tracks for. Semaphores of child
    processes get the same names.
    """
    # Python has no public way to choose these names.
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/{directory.name}"
    blocks: Any = shared_memory
    blocks._SHM_NAME_PREFIX = f"/{directory.name}-"
    blocks._SHM_SAFE_NAME_LENGTH = len(blocks._SHM_NAME_PREFIX) + _RANDOM


def unlink_shared_memory(directory: Path) -> None:
    """Unlink the semaphores and the shared memory that are named after a scratch directory."""
    for kind in ("", "sem."):
        for path in _SHARED_MEMORY.glob(f"{kind}{directory.name}-*"):
            path.unlink(missing_ok=True)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    unlink_shared_memory(directory)


def _owned_directories() -> list[tuple[Path, int]]:
    places = {Path(tempfile.gettempdir()), Path(_short_directory())}
    names = [(path, _NAME.fullmatch(path.name)) for place in places for path in place.glob("fivefold-*")]
    return [(path, int(name[1])) for path, name in names if name]


def _has_ended(pid: int) -> bool:
    """Returns whether the process is gone or a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def _is_free(path: Path) -> bool:
    with contextlib.suppress(OSError):
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(held)
    return False


def _short_directory() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST else "/tmp"  # noqa: S108 - the directory in it has an unguessable name
