"""Temporary directories that are gone with the process that has them, also where it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

_NAME = re.compile(r"fivefold-(\d+)-.+")
_LONGEST = 40
"""Characters of a directory for temporary files: the path of a socket within one of ours may have 107, of which a name that
others give it takes 37."""


def scratch_directory() -> Path:
    """A directory for this process and those that it starts, with a path that is short enough for sockets.

    Those of processes that nobody was left to clean up after are removed.
    """
    for path, owner in _found():
        if _has_ended(owner) and _is_free(path):
            shutil.rmtree(path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"fivefold-{os.getpid()}-", dir=_short_directory()))
    # Open, and so locked, until this process ends: the number of a process says nothing in another container.
    fcntl.flock(os.open(path, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)
    return path


def remove_scratch(pid: int) -> None:
    """Remove the directories of a process that has ended, or is about to."""
    for path, owner in _found():
        if owner == pid:
            shutil.rmtree(path, ignore_errors=True)


def _found() -> list[tuple[Path, int]]:
    places = {Path(tempfile.gettempdir()), Path(_short_directory())}
    found = [(path, _NAME.fullmatch(path.name)) for place in places for path in place.glob("fivefold-*")]
    return [(path, int(name[1])) for path, name in found if name]


def _has_ended(pid: int) -> bool:
    """Whether it is gone, or waits for nothing but to be counted by its parent."""
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
    return usual if len(usual) <= _LONGEST else "/tmp"  # noqa: S108 - the directory in it has a name that nobody can guess
