"""Explains why a process ended without a message: its signal, and whether the kernel killed it for lack of memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_KERNEL_LOG = Path("/dev/kmsg")


def _counters() -> list[Path]:
    """Returns the files in which the kernel counts processes that it killed for lack of memory.

    First the files of this process's cgroup (version 2 and 1), then that of the whole machine.
    """
    files = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(_CGROUPS / path.strip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(_CGROUPS / "memory" / path.strip("/") / "memory.oom_control")
    return [*files, Path("/proc/vmstat")]


def _count(path: Path) -> int:
    """Returns the file's `oom_kill`; 0 if it cannot be read."""
    with contextlib.suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


@dataclass
class MemoryWatch:
    """Kills that the kernel has counted since this object was created."""

    _since: float = field(default_factory=time.monotonic)
    _before: dict[Path, int] = field(default_factory=lambda: {path: _count(path) for path in _counters()})

    def evidence(self, pid: int) -> str:
        """Returns the evidence that the process, or one next to it, was killed for lack of memory; empty if there is
        none."""
        if line := _in_kernel_log(pid, self._since):
            return f"the kernel's log has {line!r}"
        for path, before in self._before.items():
            if (count := _count(path) - before) > 0:
                return f"{path} counts {count} such kill{'s' if count > 1 else ''} since the run began"
        return ""


def _in_kernel_log(pid: int, since: float) -> str:
    """Returns the kernel's log line about killing the process for lack of memory, if this user may read the log."""
    with contextlib.suppress(OSError):
        log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while record := os.read(log, 1 << 16).decode(errors="replace"):
                head, _, text = record.partition("\n")[0].partition(";")
                # Time in microseconds after boot. Older lines may be about another process: process ids are reused.
                if int(head.split(",")[2]) / 1e6 < since - 1:
                    continue
                if re.search(rf"\bKilled process {pid} \(", text):
                    return text
        finally:
            os.close(log)
    return ""


_LOST = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|Socket closed|recvValue failed|ncclRemoteError|"
    r"remote process exited"
)


def is_loss(error: BaseException) -> bool:
    """Returns whether the error means that another rank is gone: the reason is found there."""
    return isinstance(error, (RuntimeError, ConnectionError)) and _LOST.search(str(error)) is not None


def describe(pid: int, number: int, memory: MemoryWatch) -> str:
    """Returns how a process was ended by a signal, as a message."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number != signal.SIGKILL:
        return f"was ended by {name}"
    if evidence := memory.evidence(pid):
        return f"was killed by {name}, probably out of memory: {evidence}"
    return f"was killed by {name}; the kernel counts no process killed for lack of memory, so a user or a scheduler did it"
