"""Signs of life of a rank: twice a second it writes a record for its launcher, whatever its main thread is doing.

`Motion` detects whether the main thread makes progress. `Silence` measures how long a value has not changed. Neither reads a
clock across a pause: a suspended machine or a frozen container does not count as silent.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

SECONDS = 0.5
"""Seconds between two signs of life."""
VARIABLE = "FIVEFOLD_PULSE"
"""Environment variable with the open file of the records and the slot of this rank in it."""
_RECORD = 1024
_KERNEL_SECONDS = 2.0
"""Seconds between two looks at what the threads of a process wait for."""
_LONGEST_LOOK = 2.0
"""Most seconds that count between two looks: a process that was not running could not look."""
_WAITS = ("/torch/distributed/", "/pipeline_parallel/p2p_communication.py", "/core/distributed/param_and_grad_buffer.py")
"""Paths of code in which a main thread waits for other ranks."""
_BUSY = 0.1
"""Share of a core above which a rank on a CPU counts as computing."""
_DEPTH = 200


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a rank."""

    number: int
    """Number of signs so far."""
    has_joined: bool
    """True once the rank has joined the others. Before, it imports libraries, which can block every thread."""
    place: str
    """What the rank is doing, for messages."""


class SignBoard:
    """The launcher's side: one record for each rank of this machine."""

    def __init__(self, ranks: int) -> None:
        self.file = os.memfd_create("fivefold-pulse")
        os.ftruncate(self.file, ranks * _RECORD)

    def read(self, slot: int) -> Sign | None:
        """Returns the last sign of the rank in `slot`; None if it has not written one, or is writing now."""
        with contextlib.suppress(ValueError, TypeError):
            return Sign(**json.loads(os.pread(self.file, _RECORD, slot * _RECORD).rstrip(b"\0 ")))
        return None

    def close(self) -> None:
        os.close(self.file)


class Pulse:
    """The rank's side: a thread that writes signs of life, and calls `tick` each time."""

    def __init__(self) -> None:
        self.describe: Callable[[], tuple[bool, str]] = lambda: (False, "starting")
        """Returns whether the rank has joined the others, and what it is doing."""
        self.tick: Callable[[], None] = lambda: None

    def start(self) -> None:
        file, _, slot = os.environ.get(VARIABLE, "").partition(":")

        def beat() -> None:
            number = 0
            while True:
                number += 1
                if file:
                    text = json.dumps(dict(zip(("number", "has_joined", "place"), (number, *self.describe()), strict=True)))
                    os.pwrite(int(file), text.encode()[:_RECORD].ljust(_RECORD), int(slot) * _RECORD)
                self.tick()
                time.sleep(SECONDS)

        threading.Thread(target=beat, name="pulse", daemon=True).start()


class Stages:
    """The stages that the main thread of this rank is in; other threads read them."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._ended: set[str] = set()

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count this context as a stage, which may be inside another one."""
        self._open.append(name)
        try:
            yield
        finally:
            self._ended.add(self._open.pop())

    def now(self) -> tuple[str, bool]:
        """Returns the innermost stage, and whether a stage of that name has ended before."""
        stage = self._open[-1] if self._open else "between steps" if self._ended else "loading"
        return stage, stage in self._ended


class Silence:
    """How long a value has stayed the same, counting only time in which this process could look at it."""

    def __init__(self) -> None:
        self._last: Any = None
        self._looked: float | None = None
        self.seconds = 0.0

    def look(self, value: Any, now: float) -> float:
        """Returns the seconds for which `value` has not changed."""
        passed = 0.0 if self._looked is None else min(now - self._looked, _LONGEST_LOOK)
        self.seconds = self.seconds + passed if value == self._last else 0.0
        self._last, self._looked = value, now
        return self.seconds


class KernelWait:
    """How long any thread of this process has waited in the kernel without a break, as for a disk that does not answer."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._looked = -math.inf

    def look(self) -> float:
        """Returns the seconds since the first of the looks that all found the same thread waiting.

        Most calls return what the last look found: a process may have hundreds of threads, and Python's lock is held.
        """
        now = time.monotonic()
        if now - self._looked >= _KERNEL_SECONDS:
            self._since = {task: self._since.get(task, now) for task in _tasks_in_kernel()}
            self._looked = now
        return self._looked - min(self._since.values(), default=self._looked)


def _tasks_in_kernel() -> Iterator[str]:
    """Yields the threads of this process that wait in the kernel and cannot be interrupted."""
    for task in os.listdir("/proc/self/task"):
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/self/task/{task}/stat", os.O_RDONLY)
            try:
                stat = os.read(file, 512)
            finally:
                os.close(file)
            if stat.rpartition(b") ")[2].startswith(b"D"):
                yield task


class Motion:
    """Whether the main thread of this process makes progress, as another thread sees from its stack."""

    def __init__(self, computes_on_cpu: bool) -> None:
        """`computes_on_cpu`: using a core counts as computing. Not with a GPU, where waiting for a hung kernel uses a core
        too."""
        self._thread = threading.main_thread().ident or 0
        self._computes_on_cpu = computes_on_cpu
        self._before: tuple[Any, ...] = ()
        self._cpu = self._looked = 0.0

    @property
    def waits(self) -> bool:
        """True if the main thread waits for other ranks."""
        frame = self._frame()
        return frame is not None and any(part in frame.f_code.co_filename for part in _WAITS)

    def has_moved(self, place: tuple[int, ...], is_watched: bool) -> bool:
        """Returns whether the main thread has moved since the last call.

        A thread that does not wait for other ranks also counts as moving if it is not watched, or if it computes.
        """
        now, cpu = time.monotonic(), time.process_time()
        stack = (place, *((id(frame), id(frame.f_code), frame.f_lasti) for frame in self._frames()))
        has_changed, self._before = stack != self._before, stack
        is_busy = self._computes_on_cpu and cpu - self._cpu > _BUSY * (now - self._looked)
        self._cpu, self._looked = cpu, now
        return has_changed or (not self.waits and (is_busy or not is_watched))

    def stack(self) -> str:
        """Returns the main thread's stack, formatted like a traceback."""
        return "".join(traceback.format_stack(self._frame()))

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread)

    def _frames(self) -> Iterator[FrameType]:
        frame = self._frame()
        for _ in range(_DEPTH):
            if frame is None:
                return
            yield frame
            frame = frame.f_back
