"""Runs programs, each in its own process that can only compute. A Sandbox starts it, once per reward process.

It has imported the usual modules, so that a program starts in a millisecond. It never sees programs, inputs and outputs:
they are in files in memory, which pass from the reward process to the program's process and back. Every program gets a copy
of this process's memory, so no other program can have left anything in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fivefold.reward.code import confine, program

PREFIX = "fivefold-code-"
"""Prefix of the directories that programs write into."""
FILES = 4
"""Number of files sent with each request: the program, its input, its output, a function's result."""
STOP = b"stop"
"""Message that ends the running program; no effect if it has ended."""
NOT_BEGUN = "not begun"
"""Status of a program that could not be confined and therefore did not run."""
_MOST_THREADS = 64
_MOST_FILES = 256
_POLL_MS = 10
_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom")


def main() -> None:
    """Answer requests with `{"status": ...}`.

    A request has `{"seconds": ..., "clock": ...}`, the arguments of `program.run`, and its files.
    """
    requests = socket.socket(fileno=int(sys.argv[1]))
    memory, largest = (int(word) << 20 for word in sys.argv[2:])
    os.register_at_fork(after_in_child=requests.close)
    program.warm()
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    with _box() as box:
        is_offline = confine.leave_networks()
        limits = {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_FSIZE: largest,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_STACK: min(memory, 128 << 20),
        }
        # A Python that is not the system's has its shared libraries next to it.
        ruleset = confine.landlock_ruleset([*libraries, f"{sys.base_prefix}/lib", *_READABLE], box)
        lock = confine.confinement(ruleset, limits)
        sys.path[:] = [path for path in sys.path if any(path.startswith(library) for library in libraries)]
        requests.send(json.dumps({"landlock": confine.landlock_version(), "network_namespace": is_offline}).encode())
        while True:
            message, files, _, _ = socket.recv_fds(requests, 1 << 16, FILES)
            if not message:
                return
            if message == STOP:
                continue
            status = _run(json.loads(message), files, box, lock, requests.fileno(), memory)
            for file in files:
                os.close(file)
            _empty(box)
            if status is None:
                return
            requests.send(json.dumps({"status": status}).encode())


def _run(
    request: dict[str, Any], files: list[int], box: str, lock: Callable[[], None], requests: int, most_bytes: int
) -> str | None:
    """Return how a program ended: "ended", or why it was stopped; None if the reward process is gone."""
    seconds, parent, end = request["seconds"], os.getpid(), time.monotonic() + request["clock"]
    has_begun, begun = os.pipe()
    child = os.fork()
    if not child:
        try:
            confine.end_with_parent(parent)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds) + 1,) * 2)
            os.chdir(box)
            program.run(files, request, lock, begun)
        finally:
            os._exit(1)
    handle = os.pidfd_open(child)
    reason: str | None = ""
    try:
        events = select.poll()
        events.register(handle, select.POLLIN)
        events.register(requests, select.POLLIN | select.POLLHUP | select.POLLRDHUP)
        while not reason:
            ready = dict(events.poll(_POLL_MS))
            if handle in ready:
                break
            if ready.get(requests) == select.POLLIN:
                # This is STOP: `main` reads it. A program that has not begun yet may still be one that cannot be locked up.
                reason = "stopped"
                select.select([handle, has_begun], [], [], max(0.0, end - time.monotonic()))
                break
            reason = None if requests in ready else _excess(child, seconds, end, box, most_bytes)
            if reason is None:
                break
    finally:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(begun)
        started = os.read(has_begun, 1)
        for file in (handle, has_begun):
            os.close(file)
    if reason is None:
        return None
    if not started:
        return NOT_BEGUN
    if reason:
        return reason
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return "time" if -code == signal.SIGXCPU else f"ended by {signal.Signals(-code).name}"
    return "ended" if code == 0 else f"exit code {code}"


def _excess(child: int, seconds: float, end: float, box: str, most_bytes: int) -> str:
    """Return the limit that a program has exceeded, among those that the kernel does not enforce; empty for none."""
    with contextlib.suppress(OSError):
        # After the name in brackets: state is the first field, CPU times in ticks the 12th and 13th, threads the 18th.
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        if (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > seconds:
            return "time"
        if int(fields[17]) > _MOST_THREADS:
            return "threads"
    if time.monotonic() > end:
        return "time"
    with os.scandir(box) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
    return "files" if len(sizes) > _MOST_FILES or sum(sizes) > most_bytes else ""


def _empty(box: str) -> None:
    with os.scandir(box) as entries:
        for entry in entries:
            os.unlink(entry.path)


@contextlib.contextmanager
def _box() -> Any:
    """Create a directory and remove it at the end; also remove directories of killed servers, whose locks are free."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            # A new directory may not be locked yet.
            if time.time() - old.lstat().st_mtime > 60:
                _remove_unless_locked(old)
    path = tempfile.mkdtemp(prefix=PREFIX)
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def _remove_unless_locked(path: Path) -> None:
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)


if __name__ == "__main__":
    main()
