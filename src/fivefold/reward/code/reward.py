"""The rewards `code` and `code_fraction`: what a program in a response does on the tests of its task."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from fivefold.reward.code.cases import CHEATED, Case, Cases, program_of, read_cases
from fivefold.reward.code.remote import NOT_TESTABLE
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
    trusted_tests: bool = False
    sandbox: Sandbox = field(init=False)
    tests: Sandbox = field(init=False)
    """Runs assertions, next to the program in the other one."""

    def __post_init__(self) -> None:
        self.sandbox, self.tests = Sandbox(self.memory_mb), Sandbox(self.memory_mb)

    def close(self) -> None:
        """End both sandboxes."""
        self.sandbox.close()
        self.tests.close()

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
            is_right = self._passes(program, tests, case, min(self.test_seconds, left), left)
            passed += is_right
            if not is_right and not to_the_end:
                break
        return passed, len(tests.cases)

    def _passes(self, program: str, tests: Cases, case: Case, seconds: float, left: float) -> bool:
        clock = min(_CLOCK_FACTOR * self.test_seconds, left)
        fault = None if case.tests is None else case.tests.fault
        if case.tests is not None and fault is None:
            status = self.tests.check(self.sandbox, program, case.tests, seconds, clock)
            if status != f"exit code {NOT_TESTABLE}":
                return status == "ended"
            fault = "they hand the program what is no plain value"
        if fault is not None and not self.trusted_tests:
            raise ValueError(f"assert_code must have assertions on plain values, {CHEATED.format(fault)}")
        # A program that ends before trusted tests do has not written it.
        end_mark = secrets.token_hex(8)
        ran = self.sandbox.run(case.program(program, end_mark), case.given, tests.function, seconds, clock)
        return ran.status == "ended" and tests.is_right(case, ran.output, end_mark)


_tests = ProgramTests()


def configure(test_seconds: float, memory_mb: int, sample_seconds: float, trusted_tests: bool) -> None:
    """Set what the tests of this process may take."""
    global _tests
    _tests = ProgramTests(test_seconds, memory_mb, sample_seconds, trusted_tests)


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
