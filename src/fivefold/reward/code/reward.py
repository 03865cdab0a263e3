"""The rewards `code` and `code_fraction`: what a program in a response does on the tests of its task."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from fivefold.reward.code.cases import program_of, read_cases
from fivefold.reward.code.sandbox import Sandbox

_SHARE_OF_TIME = 0.8
"""Of a sample's time limit that its tests may take together: what is left is for starting and comparing."""

_CLOCK_FACTOR = 3
"""A test may take so many times its CPU time by the clock: the machine may be busy."""


@dataclass
class ProgramTests:
    """Runs the tests of this process's samples."""

    test_seconds: float = 4.0
    memory_mb: int = 1024
    sample_seconds: float = 10.0
    sandbox: Sandbox = field(init=False)

    def __post_init__(self) -> None:
        self.sandbox = Sandbox(self.memory_mb)

    def passed(self, response: str, ground_truth: str, to_the_end: bool) -> tuple[int, int]:
        """(tests passed, all tests); without `to_the_end` no further test is run after one that failed.

        Tests that the sample's time does not reach have failed.
        """
        tests, program = read_cases(ground_truth), program_of(response)
        end, passed = time.monotonic() + _SHARE_OF_TIME * self.sample_seconds, 0
        for case in tests.cases:
            left = end - time.monotonic()
            if left <= 0:
                break
            clock = min(_CLOCK_FACTOR * self.test_seconds, left)
            # Nobody knows it beforehand: a program that ends before its check does not write it.
            end_mark = secrets.token_hex(8)
            ran = self.sandbox.run(
                case.program(program, end_mark), case.given, tests.function, min(self.test_seconds, left), clock
            )
            is_right = ran.status == "ended" and tests.is_right(case, ran.output, end_mark)
            passed += is_right
            if not is_right and not to_the_end:
                break
        return passed, len(tests.cases)


_tests = ProgramTests()


def configure(test_seconds: float, memory_mb: int, sample_seconds: float) -> None:
    """Set what the tests of this process may take."""
    global _tests
    _tests = ProgramTests(test_seconds, memory_mb, sample_seconds)


def start_sandbox() -> None:
    """Start the sandbox; raises RuntimeError where programs cannot be locked up."""
    _tests.sandbox.start()


def code(response: str, ground_truth: str) -> float:
    """1 when the program in the response passes every test, 0 otherwise."""
    passed, tests = _tests.passed(response, ground_truth, to_the_end=False)
    return float(passed == tests)


def code_fraction(response: str, ground_truth: str) -> float:
    """The share of the tests that the program in the response passes."""
    passed, tests = _tests.passed(response, ground_truth, to_the_end=True)
    return passed / tests
