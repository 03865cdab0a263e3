"""A limit on the CPU time of a call in this process: of the machine's load it does not depend."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TooLongError(BaseException):
    """Raised in a call that takes too long. No Exception, so that no library takes it for one of its own."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """The result of a call; raises TooLongError once it has taken so many seconds of this process's CPU time."""
    is_over = False

    def end(number: int, frame: object) -> None:
        if not is_over:
            raise TooLongError

    before = signal.signal(signal.SIGPROF, end)
    try:
        try:
            # Again and again, as a library may catch everything.
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 4)
            return function()
        finally:
            is_over = True
    finally:
        # The signal may have come between the call and the line above.
        is_over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
