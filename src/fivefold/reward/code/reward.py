"""The rewards `code` and `code_fraction`: results of a program in a response on the tests of its task."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from fivefold.errors import UserError
from fivefold.reward.code.cases import CHEATED, Case, Cases, program_of, read_cases
from fivefold.reward.code.sandbox import Sandbox
from fivefold.reward.code.untestable import FAULTS

_SHARE_OF_TIME = 0.8
"""Share of a sample's time limit that its tests may take together; the rest is for starting and comparing."""

_CLOCK_FACTOR = 3
"""Largest wall-clock time of a test, as a multiple of its CPU time, because the machine may be busy."""


@dataclass
class ProgramTests:
    """Runs the tests of this process's samples."""

    test_seconds: float = 4.0
    memory_mb: int = 1024
    sample_seconds: float = 10.0
    trusted_tests: bool = False
    sandbox: Sandbox = field(init=False)
    tests: Sandbox = field(init=False)
    """Sandbox that runs assertions, next to the sandbox of the program."""

    def __post_init__(self) -> None:
        self.sandbox, self.tests = Sandbox(self.memory_mb), Sandbox(self.memory_mb)

    def close(self) -> None:
        """End both sandboxes."""
        self.sandbox.close()
        self.tests.close()

    def passed(self, response: str, ground_truth: str, to_the_end: bool) -> tuple[int, int]:
        """Return (tests passed, all tests); without `to_the_end`, stop after the first failure.

        Tests that do not start within the sample's time have failed.
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
            if status not in FAULTS:
                return status == "ended"
            fault = FAULTS[status]
        if fault is not None and not self.trusted_tests:
            raise UserError(f"assert_code must have assertions on plain values, {CHEATED.format(fault)}")
        # A program that exits before the trusted tests finish has not written the mark.
        end_mark = secrets.token_hex(8)
        ran = self.sandbox.run(case.program(program, end_mark), case.input_text, tests.function, seconds, clock)
        return ran.status == "ended" and tests.is_right(case, ran.output, end_mark)


_tests = ProgramTests()


def configure(test_seconds: float, memory_mb: int, sample_seconds: float, trusted_tests: bool) -> None:
    """Set the limits of this process's tests."""
    global _tests
    _tests = ProgramTests(test_seconds, memory_mb, sample_seconds, trusted_tests)


def start_sandbox() -> None:
    """Start the sandbox; raise RuntimeError if programs cannot be confined here."""
    _tests.sandbox.start()


def code(response: str, ground_truth: str) -> float:
    """Return 1 if the program in the response passes every test, 0 otherwise."""
    passed, tests = _tests.passed(response, ground_truth, to_the_end=False)
    return float(passed == tests)


def code_fraction(response: str, ground_truth: str) -> float:
    """Return the share of the tests that the program in the response passes."""
    passed, tests = _tests.passed(response, ground_truth, to_the_end=True)
    return passed / tests
