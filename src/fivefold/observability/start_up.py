"""What the start of a run takes: seconds from the command to the first response, part by part without a gap."""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "FIVEFOLD_BEGAN"
"""Environment variable with the time at which the command began, as `time.time` counts it."""


class StartUp:
    """Adds up the time since the process's command began; each mark ends a part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        """Part -> seconds, in the order in which they ended."""
        self._since: float | None = None

    def begin(self) -> None:
        """Count from the time in the environment, or else from the start of this process; that start ends `launch`."""
        created = created_at()
        self._since = min(created, float(os.environ.get(VARIABLE, created)))
        self._end_part("launch", created)

    def mark(self, part: str) -> None:
        """End a part that began with the previous mark; its time is added to earlier ones of that name."""
        if self._since is not None:
            self._end_part(part, time.time())

    def end(self, part: str) -> dict[str, float]:
        """End the last part and return all of them; empty if the start is over already, or was not counted."""
        self.mark(part)
        is_counted, self._since = self._since is not None, None
        return self.parts if is_counted else {}

    def _end_part(self, part: str, now: float) -> None:
        assert self._since is not None
        self.parts[part] = self.parts.get(part, 0.0) + max(0.0, now - self._since)
        self._since = now


def created_at() -> float:
    """Return the time at which this process was created. psutil counts it from a second of the boot, which is too coarse."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def command_began() -> str:
    """Return the time for the environment of ranks: that of the command that set it in this process, or now."""
    return os.environ.get(VARIABLE) or str(time.time())


start_up = StartUp()
"""The start of this process's run; it counts nothing in a process that is no rank."""
