"""Reasons why assertion tests cannot run next to a program, found when they run, and how their process reports them."""

from __future__ import annotations

import enum
import os
from typing import NoReturn


class Untestable(enum.Enum):
    """Reason why tests cannot be run in a separate process: its exit code, and a sentence about them."""

    ARGUMENT = 3, "they pass the program what is not a plain value"
    COMPARISON = 4, "they compare objects of the program's own class"
    NO_CALL = 5, "they never call the program"
    FIXTURE = 6, "they take fixtures"
    PYTEST = 7, "they use what this pytest does not have"


FAULTS = {f"exit code {reason.value[0]}": reason.value[1] for reason in Untestable}
"""Status of a tests' process -> why its tests cannot be run."""


def refuse_tests(reason: Untestable) -> NoReturn:
    """End this process at once: an exception would be one that the tests could expect."""
    os._exit(reason.value[0])
