"""Watching the ranks of a run until it ends: signals are handed on, the reason of a failure is told, the rest is ended."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any, Protocol

FAILED = 1
ASKED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of ranks that ended because they were asked to."""
PAUSE = 2.0
"""Seconds after which a second Ctrl-C is a person's, and not the same one that reached a process by another way too."""
_REASON_SECONDS = 5.0
"""Time for the rank with the reason to be seen: one whose memory the kernel still takes apart has not ended yet."""
_LATE_SECONDS = 10.0
"""Between the first and the last rank that end because they were asked to; then the rest is killed."""
_GRACE_SECONDS = 3.0
"""Time ranks get to end by themselves after another one failed."""


class Kind(IntEnum):
    """Of a cause; where there are several, the smallest is the headline."""

    KILLED = 0
    """By a signal, or with its machine, or it has stopped: the others only follow."""
    RAISED = 1
    SILENT = 2
    """It ended with an error and said nothing."""
    LOST = 3
    """All it knows is that another rank is gone."""


@dataclass(frozen=True)
class Cause:
    """Why a rank ended."""

    kind: Kind
    order: int
    """Among those of a kind the smallest is the headline: a time, or the rank."""
    text: str
    tail: tuple[str, ...] = ()
    """The end of its log."""


class Ranks(Protocol):
    """All ranks of a run, wherever they are."""

    def codes(self) -> list[int | None]:
        """Exit codes, None of those that run."""
        ...

    def send(self, number: int) -> None:
        """Send a signal to those that run."""
        ...

    def silent(self) -> list[Cause]:
        """Ranks that run and have given no sign of life for too long."""
        ...

    def causes(self) -> list[Cause]:
        """Why ranks ended, as far as it is seen; nothing as long as all that is seen are ranks that lost another one."""
        ...

    def losses(self) -> list[Cause]:
        """What those say that lost another one."""
        ...


class Signals:
    """SIGINT and SIGTERM of this process, taken down while this is entered."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        """The request to end, and behind it the second one of a person."""
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take them down, even if a library has put a handler of its own in the place."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.taken and (number != signal.SIGINT or time.monotonic() < self._first + PAUSE):
            # The same request by another way: Slurm and systemd send it to every process.
            return
        self.taken.append(number)
        self._first = time.monotonic()

    @property
    def code(self) -> int:
        """The exit code of a run that was asked to end; 0 if it was not."""
        return 128 + self.taken[0] if self.taken else 0

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def watch(ranks: Ranks, signals: Signals) -> int:
    """Return when all ranks have ended, or are to be killed; the exit code of the run.

    When one fails, its reason is shown and the others are asked to end. A signal is handed on, so that the ranks save and
    end; a second Ctrl-C kills them.
    """
    first_end: float | None = None
    handed_on = 0
    while True:
        while handed_on < len(signals.taken):
            ranks.send(signal.SIGKILL if handed_on else signal.SIGTERM)
            handed_on += 1
        codes = ranks.codes()
        if signals.taken and first_end is None and any(code is not None for code in codes):
            first_end = time.monotonic()
        if any(code not in (None, 0, *ASKED) for code in codes) and len(signals.taken) < 2:
            # Ranks that lose their partner fail too, and now and then they are seen first.
            deadline = time.monotonic() + _REASON_SECONDS
            while not (found := ranks.causes()) and time.monotonic() < deadline:
                time.sleep(0.05)
            return _fail(ranks, found or ranks.losses())
        if (silent := ranks.silent()) and len(signals.taken) < 2:
            return _fail(ranks, silent)
        # Ranks end together. One that ended before they were joined leaves others in a wait that no signal's handler breaks.
        is_late = first_end is not None and time.monotonic() > first_end + _LATE_SECONDS
        if is_late or all(code is not None for code in codes):
            return signals.code or max(code or 0 for code in codes)
        time.sleep(0.1)


def _fail(ranks: Ranks, causes: list[Cause]) -> int:
    """Show why the run ends, and let the ranks end; the exit code."""
    print(f"\n{_told(causes)}", file=sys.stderr, flush=True)
    _end(ranks)
    return FAILED


def _told(causes: list[Cause]) -> str:
    """All that were killed, or else the first of the gravest kind."""
    first, *others = sorted(causes, key=lambda cause: (cause.kind, cause.order))
    killed = [cause.text for cause in others if cause.kind == first.kind == Kind.KILLED]
    return "\n".join([first.text, *killed, *first.tail])


def _end(ranks: Ranks) -> None:
    ranks.send(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(code is None for code in ranks.codes()) and time.monotonic() < deadline:
        time.sleep(0.05)
