"""Allows one run at a time in a directory, across machines that share it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.checkpoint.lock_file import ALONE, LOCK
from fivefold.errors import UserError
from fivefold.files import open_file

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NOT_OF_DIRECTORIES = (errno.EBADF, errno.EINVAL, errno.EISDIR)
"""Errors where a directory cannot be locked: NFS locks only files that are open for writing."""


@contextmanager
def locked(run_dir: Path) -> Iterator[tuple[int, ...]]:
    """Hold a directory for this run, by its lock file and by the directory itself: removing the lock file does not free it.

    Yields the open files. Processes that inherit them hold the lock too: the kernel releases it when the last of them ends,
    in whatever way. Raises ValueError while another run holds the directory. A directory that others may read gets the
    permissions that `trainer.umask` leaves, which is this process's.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = open_file(run_dir / LOCK, os.O_RDWR | os.O_CREAT)
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = not _lock_directory(directory)
        except BlockingIOError:
            holder = (
                os.pread(file, 1000, 0).decode(errors="replace").partition("\n")[0]
                or f"another run, which made another {LOCK}"
            )
            raise UserError(
                f"trainer.run_dir: {run_dir} is in use by {holder}; wait for it, or choose another trainer.run_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_alone = True
            print(f"note     {run_dir} is on a file system without locks: nothing keeps a second run out of it", flush=True)
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        os.ftruncate(file, 0)
        text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n" + f"{ALONE}\n" * is_alone
        os.pwrite(file, text.encode(), 0)
        _tighten(directory, run_dir)
        yield file, directory
    finally:
        os.close(directory)
        os.close(file)


def _tighten(directory: int, run_dir: Path) -> None:
    """Take the permissions that this process's umask removes from an open directory, which may be older than its run."""
    mask = os.umask(0o077)
    os.umask(mask)
    mode = stat.S_IMODE(os.fstat(directory).st_mode)
    if not mode & mask:
        return
    try:
        os.fchmod(directory, mode & ~mask)
        outcome = f"it is {mode & ~mask:04o} now, as trainer.umask says"
    except OSError as error:
        outcome = f"other users can reach it, and it cannot be changed: {error.strerror}"
    print(f"note     {run_dir} had the mode {mode:04o}: {outcome}", flush=True)


def _lock_directory(directory: int) -> bool:
    """Lock an open directory; return whether its file system supports that."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NOT_OF_DIRECTORIES:
            raise
        return False
    return True
