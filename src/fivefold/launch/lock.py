"""One run at a time in a directory, across machines that share it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.files import open_file

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Hold a directory for this run; its open file, which processes that inherit it hold too. The kernel lets go of it when
    the last of them ends, in whatever way. Raises ValueError while another run has it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # NFS locks files that are open for writing only.
    file = open_file(run_dir / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "another run"
            raise ValueError(
                f"trainer.run_dir: {run_dir} is in use by {holder}; wait for it, or choose another trainer.run_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"note     {run_dir} is on a file system without locks: nothing keeps a second run out of it", flush=True)
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
        yield file
    finally:
        os.close(file)
