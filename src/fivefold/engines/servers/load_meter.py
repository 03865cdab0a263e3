"""Measures the load of servers: requests in flight over time."""

from __future__ import annotations

import threading
import time

from fivefold.interfaces import Load

_FINEST = 0.1
"""Least seconds between two points of the curve."""


class LoadMeter:
    """Load over time, written by one thread and read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._begin = 0, time.monotonic()
        self._since = self._begin
        self._idle = self._sum = 0.0
        self._curve: list[tuple[float, int]] = []

    def now(self, count: int) -> None:
        """Set the number of requests in flight from now on."""
        with self._lock:
            self._advance()
            is_edge = (count == 0) != (self._count == 0)
            self._count = count
            if is_edge or not self._curve or time.time() - self._curve[-1][0] > _FINEST:
                self._curve.append((time.time(), count))

    def read(self) -> Load:
        """Returns the load since the previous call."""
        with self._lock:
            self._advance()
            load = Load(self._since - self._begin, self._idle, self._sum, self._curve)
            self._begin, self._idle, self._sum = self._since, 0.0, 0.0
            self._curve = [(time.time(), self._count)]
        return load

    def _advance(self) -> None:
        now = time.monotonic()
        self._sum += self._count * (now - self._since)
        self._idle += 0.0 if self._count else now - self._since
        self._since = now
