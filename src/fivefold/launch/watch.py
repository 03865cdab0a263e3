"""Watches the ranks of a run until it ends: forwards signals, shows the reason of a failure, and ends the remaining
ranks."""

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
"""Exit codes of ranks that ended on request."""
PAUSE = 2.0
"""Seconds after which a second Ctrl-C counts as a new one by the user. Before, it is the same one that reached the process
in another way too."""
_REASON_SECONDS = 5.0
"""Seconds to wait for the rank with the reason to end: the kernel may still be freeing its memory."""
_LATE_SECONDS = 10.0
"""Seconds between the first and the last rank that end on request; then the remaining ranks are killed."""
_GRACE_SECONDS = 3.0
"""Seconds in which ranks may end by themselves after another one failed."""


class Kind(IntEnum):
    """Kind of a cause; if there are several causes, the smallest kind is the headline."""

    KILLED = 0
    """Ended by a signal or with its machine, or stopped: the other ranks only follow."""
    RAISED = 1
    SILENT = 2
    """Ended with an error and without a message."""
    LOST = 3
    """Reports only that another rank is gone."""


@dataclass(frozen=True)
class Cause:
    """Why a rank ended."""

    kind: Kind
    order: int
    """The smallest among causes of a kind is the headline: a time, or the rank."""
    text: str
    tail: tuple[str, ...] = ()
    """The end of the rank's log."""


class Ranks(Protocol):
    """All ranks of a run, on whatever machine they are."""

    def codes(self) -> list[int | None]:
        """Returns the exit codes; None for ranks that still run."""
        ...

    def send(self, number: int) -> None:
        """Send a signal to the ranks that still run."""
        ...

    def silent(self) -> list[Cause]:
        """Returns a cause for each rank that runs and has given no sign of life for too long."""
        ...

    def causes(self) -> list[Cause]:
        """Returns why ranks ended, as far as is known; empty if all known ranks only lost another rank."""
        ...

    def losses(self) -> list[Cause]:
        """Returns the messages of ranks that lost another rank."""
        ...


class Signals:
    """Records SIGINT and SIGTERM of this process within its context."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        """The request to end, then the user's second Ctrl-C, if any."""
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers, even if a library has replaced them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.taken and (number != signal.SIGINT or time.monotonic() < self._first + PAUSE):
            # This is the same request: Slurm and systemd send it to every process.
            return
        self.taken.append(number)
        self._first = time.monotonic()

    @property
    def code(self) -> int:
        """The exit code of a run that was asked to end; 0 otherwise."""
        return 128 + self.taken[0] if self.taken else 0

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def watch(ranks: Ranks, signals: Signals) -> int:
    """Wait until all ranks have ended, or have to be killed; returns the exit code of the run.

    When one fails, its reason is shown and the others are asked to end. A signal is forwarded, so that the ranks save and
    end; a second Ctrl-C kills them.
    """
    first_end: float | None = None
    handed_on = 0
    while True:
        while handed_on < len(signals.taken):
            if not handed_on:
                _acknowledge(signals.taken[0])
            ranks.send(signal.SIGKILL if handed_on else signal.SIGTERM)
            handed_on += 1
        codes = ranks.codes()
        if signals.taken and first_end is None and any(code is not None for code in codes):
            first_end = time.monotonic()
        if any(code not in (None, 0, *ASKED) for code in codes) and len(signals.taken) < 2:
            # Ranks that lose another rank fail too, and sometimes end first.
            deadline = time.monotonic() + _REASON_SECONDS
            while not (causes := ranks.causes()) and time.monotonic() < deadline:
                time.sleep(0.05)
            return _fail(ranks, causes or ranks.losses())
        if (silent := ranks.silent()) and len(signals.taken) < 2:
            return _fail(ranks, silent)
        # Ranks end together. A rank that ended before all had joined leaves others in a wait that no signal handler
        # interrupts.
        is_late = first_end is not None and time.monotonic() > first_end + _LATE_SECONDS
        if is_late or all(code is not None for code in codes):
            return signals.code or max(code or 0 for code in codes)
        time.sleep(0.1)


def name_of(number: int) -> str:
    """Returns the name of a signal as a user knows it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _acknowledge(number: int) -> None:
    """Tell the user that the request to end has arrived."""
    again = "; a second Ctrl-C ends it at once, without saving" if number == signal.SIGINT else ""
    print(f"\nasked to end by {name_of(number)}: the run saves its state and ends{again}", flush=True)


def _fail(ranks: Ranks, causes: list[Cause]) -> int:
    """Show why the run ends, and end the ranks; returns the exit code."""
    print(f"\n{_told(causes)}", file=sys.stderr, flush=True)
    _end(ranks)
    return FAILED


def _told(causes: list[Cause]) -> str:
    """Returns the text of all killed ranks, or else of the first cause of the smallest kind."""
    first, *others = sorted(causes, key=lambda cause: (cause.kind, cause.order))
    killed = [cause.text for cause in others if cause.kind == first.kind == Kind.KILLED]
    return "\n".join([first.text, *killed, *first.tail])


def _end(ranks: Ranks) -> None:
    ranks.send(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(code is None for code in ranks.codes()) and time.monotonic() < deadline:
        time.sleep(0.05)
