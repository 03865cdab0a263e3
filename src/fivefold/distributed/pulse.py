"""A rank's signs of life: twice a second it writes a record that its launcher reads, whatever its main thread is doing.

`Motion` tells whether that main thread gets on, `Silence` measures how long something has not changed. None of them reads a
clock across a pause: a machine that was suspended, or a container that was frozen, has not been silent.
"""

from __future__ import annotations

import contextlib
import json
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
"""Between two signs of life."""
VARIABLE = "FIVEFOLD_PULSE"
"""Variable of the environment: the open file of the records and the number of this rank's."""
_RECORD = 1024
_LONGEST_LOOK = 2.0
"""Seconds between two looks that count; a process that was not running for longer could not look."""
_WAITS = ("/torch/distributed/", "/pipeline_parallel/p2p_communication.py", "/core/distributed/param_and_grad_buffer.py")
"""Code in which a main thread waits for other ranks."""
_BUSY = 0.1
"""Share of a core from which on a rank on a CPU computes."""
_DEPTH = 200


@dataclass(frozen=True)
class Sign:
    """What a rank last wrote."""

    number: int
    """Signs so far."""
    has_joined: bool
    """The rank has met the others; before it imports libraries, which can keep every thread waiting."""
    place: str
    """What it is doing, for messages."""


class SignBoard:
    """The launcher's end: one record for each rank of this machine."""

    def __init__(self, ranks: int) -> None:
        self.file = os.memfd_create("fivefold-pulse")
        os.ftruncate(self.file, ranks * _RECORD)

    def read(self, slot: int) -> Sign | None:
        """What the rank last wrote; None where it has not written, or is writing right now."""
        with contextlib.suppress(ValueError, TypeError):
            return Sign(**json.loads(os.pread(self.file, _RECORD, slot * _RECORD).rstrip(b"\0 ")))
        return None

    def close(self) -> None:
        os.close(self.file)


class Pulse:
    """The rank's end: a thread that writes signs of life, and calls `tick` each time."""

    def __init__(self) -> None:
        self.describe: Callable[[], tuple[bool, str]] = lambda: (False, "starting")
        """Whether the rank has joined the others, and what it is doing."""
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


class Silence:
    """How long a value has stayed the same, in the time in which this process could look at it."""

    def __init__(self) -> None:
        self._last: Any = None
        self._looked: float | None = None
        self.seconds = 0.0

    def look(self, value: Any, now: float) -> float:
        """Seconds for which the value is what it was."""
        passed = 0.0 if self._looked is None else min(now - self._looked, _LONGEST_LOOK)
        self.seconds = self.seconds + passed if value == self._last else 0.0
        self._last, self._looked = value, now
        return self.seconds


class Motion:
    """Whether the main thread of this process gets on: another thread looks at its stack."""

    def __init__(self, computes_on_cpu: bool) -> None:
        """`computes_on_cpu`: a rank that uses a core computes. With a GPU, waiting for a hung kernel uses one too."""
        self._thread = threading.main_thread().ident or 0
        self._computes_on_cpu = computes_on_cpu
        self._before: tuple[Any, ...] = ()
        self._cpu = self._looked = 0.0

    @property
    def waits(self) -> bool:
        """The main thread waits for other ranks."""
        frame = self._frame()
        return frame is not None and any(part in frame.f_code.co_filename for part in _WAITS)

    def has_moved(self, place: tuple[int, ...], is_watched: bool) -> bool:
        """Whether it has moved since the last call. One that does not wait for other ranks is also taken to move where it is
        not watched, and where it computes."""
        now, cpu = time.monotonic(), time.process_time()
        stack = (place, *((id(frame), id(frame.f_code), frame.f_lasti) for frame in self._frames()))
        has_changed, self._before = stack != self._before, stack
        is_busy = self._computes_on_cpu and cpu - self._cpu > _BUSY * (now - self._looked)
        self._cpu, self._looked = cpu, now
        return has_changed or (not self.waits and (is_busy or not is_watched))

    def stack(self) -> str:
        """The main thread's stack, as a traceback shows it."""
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
