"""CPU-time limit for a call in this process, independent of the machine's load."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TooLongError(BaseException):
    """Raised in a call that takes too long. It is not an Exception, so that no library catches it as its own."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return the result of a call; raise TooLongError once it has used so many seconds of this process's CPU time."""
    is_over = False

    def end(number: int, frame: object) -> None:
        if not is_over:
            raise TooLongError

    before = signal.signal(signal.SIGPROF, end)
    try:
        try:
            # The timer repeats, because a library may catch everything.
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 4)
            return function()
        finally:
            is_over = True
    finally:
        # The signal may arrive between the call and the line above.
        is_over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
