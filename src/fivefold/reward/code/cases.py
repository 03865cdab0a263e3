"""Ground truths of the public code sets -> tests; responses -> programs; outputs of programs -> whether they are right."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.errors import UserError, sentence_of
from fivefold.reward.code.assertions import Assertions, read_assertions
from fivefold.reward.code.program import GIVEN

FORMS = (
    'JSON of {"inputs": [...], "outputs": [...]}, [{"input": ..., "output": ...}, ...], '
    '[{"stdin": ..., "expected_stdout": ...}, ...] or [{"assert_code": ...}, ...]'
)
"""Form of a ground truth of `code`."""
_TOLERANCE = 1e-6
"""Relative and absolute tolerance for numbers written with a point or an exponent."""


@dataclass(frozen=True)
class Case:
    """One test of a program."""

    input_text: str
    """Standard input, or a function's arguments as a JSON list."""
    expected: Any
    """Text that the program should write, or value that the function should return."""
    tests: Assertions | None = None
    """Assertions that call the program and pass if they run to their end; `input_text` and `expected` are then unused."""
    trusted: str = ""
    """The same tests as one program, for tests that only the program's own process can run."""

    def program(self, text: str, end: str) -> str:
        """Return the program of a response with trusted tests after it; they write `end` if they hold."""
        return text if self.tests is None else f"{GIVEN}{text}\n\n{self.trusted}\nprint({end!r})\n"


@dataclass(frozen=True)
class Cases:
    """All tests of a task."""

    cases: list[Case]
    function: str | None
    """Name of the function to call, or of the method of Solution; None if the program reads and writes."""

    def is_right(self, case: Case, output: str, end: str) -> bool:
        """Return whether a program's output, or a function's result as JSON, is what the test expects.

        For trusted tests: whether they ran to their end.
        """
        if case.tests is not None:
            return output.rstrip().endswith(end)
        if self.function is None:
            return same_text(output, case.expected)
        try:
            result = json.loads(output)
        except (ValueError, RecursionError):
            return False
        # APPS wraps a result in a list.
        unwrapped = case.expected[0] if isinstance(case.expected, list) and len(case.expected) == 1 else case.expected
        return same_value(result, case.expected) or same_value(result, unwrapped)


def read_cases(ground_truth: str) -> Cases:
    """Return the tests of a ground truth; raise ValueError if there are none.

    A ground truth is JSON. APPS, TACO, PRIME's Eurus-2-RL-data and verl's forms of LiveCodeBench have `{"inputs": [...],
    "outputs": [...], "fn_name": name or absent}`. LiveCodeBench has `[{"input": ..., "output": ..., "testtype": "stdin" or
    "functional"}]`, with `fn_name` or `metadata: {"func_name": name}`. KodCode, as ROLL stores it, has `[{"assert_code":
    Python}]`: assertions, and functions `test_...` that are called.
    """
    must = f"the ground truth of `code` is {FORMS}"
    try:
        truth = json.loads(ground_truth)
        if isinstance(truth, list) and truth and "assert_code" in truth[0]:
            return Cases([_check_case(row) for row in truth], None)
        if isinstance(truth, list) and truth and "stdin" in truth[0]:
            rows, function = [(row["stdin"], row["expected_stdout"]) for row in truth], None
        elif isinstance(truth, list):
            rows = [(row["input"], row["output"]) for row in truth]
            function = _function_of(truth[0]) if truth else None
        else:
            rows = list(zip(truth["inputs"], truth["outputs"], strict=True))
            function = truth.get("fn_name") or None
        cases = [_call_case(*row) if function else _text_case(*row) for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{must}: {sentence_of(error) or repr(error)}; got {ground_truth[:200]!r}") from error
    if not cases:
        raise UserError(f"{must}: there is no test in {ground_truth[:200]!r}")
    return Cases(cases, function)


def cases_fault(ground_truth: str, trusted_tests: bool = False) -> str | None:
    """Return the requirement that a ground truth of `code` violates, or None."""
    try:
        cases = read_cases(ground_truth).cases
    except UserError:
        return f"must be {FORMS}"
    faults = (case.tests.fault for case in cases if case.tests is not None)
    fault = next((fault for fault in faults if fault is not None), None)
    return None if fault is None or trusted_tests else f"must have assertions on plain values, {CHEATED.format(fault)}"


def _function_of(row: dict[str, Any]) -> str | None:
    if row.get("testtype") == "stdin":
        return None
    return row.get("fn_name") or (row.get("metadata") or {}).get("func_name") or None


CHEATED = "which a program cannot cheat: {}; leave such rows out, or trust them by reward.code.trusted_tests: true"
_FROM_SOLUTION = re.compile(r"^from solution import .*$", re.MULTILINE)


def _check_case(row: dict[str, Any]) -> Case:
    """Return assertions whose functions `test_...` are called in their order; raise ValueError if they are not Python."""
    text = _FROM_SOLUTION.sub("", row["assert_code"])
    if "{response}" in text:
        raise UserError("checks of the text of a response are not supported: assert_code runs after its program")
    tests = read_assertions(row["assert_code"])
    parts = ast.parse(text).body
    named = [part.name for part in parts if isinstance(part, ast.FunctionDef) and part.name.startswith("test_")]
    return Case("", "", tests, "\n".join([text, *(f"{name}()" for name in named)]))


def _text_case(input_text: Any, expected: Any) -> Case:
    return Case(_text(input_text), _text(expected))


def _text(value: Any) -> str:
    """Return a text, or lines joined into one."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call_case(arguments: Any, expected: Any) -> Case:
    """Parse arguments from a list or from JSON with one per line, and a result from a value or JSON."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    if not isinstance(arguments, list):
        raise UserError(f"the arguments of a function are a list: got {arguments!r}")
    return Case(json.dumps(arguments), expected)


def program_of(response: str) -> str:
    """Return the last Python block of a response (```python, ```py or ```), or all of it if there is none."""
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    indent, lines = "", [""]
    for line in response.split("\n"):
        mark = line.strip()
        if language is None and mark.startswith("```"):
            language, indent, lines = mark[3:].strip().lower(), line[: line.index("`")], []
        elif language is not None and mark == "```":
            blocks.append((language, _without(indent, lines)))
            language = None
        elif language is not None:
            lines.append(line)
    for wanted in (("python", "python3", "py"), ("",)):
        programs = [text for name, text in blocks if name in wanted]
        if programs:
            return programs[-1]
    return response


def _without(indent: str, lines: list[str]) -> str:
    """Return the lines of a block without the indentation of its fence, which they have in an item of a list."""
    first = next((line for line in lines if line.strip()), "")
    return "\n".join(line.removeprefix(indent) for line in lines) if first.startswith(indent) else "\n".join(lines)


def same_text(output: str, expected: str) -> bool:
    """Compare texts line by line and word by word, numbers by their values, without empty lines at both ends."""
    ours, theirs = ([line.split() for line in text.strip().split("\n")] for text in (output, expected))
    return len(ours) == len(theirs) and all(_same_words(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_words(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return len(ours) == len(theirs) and all(a == b or _same_number(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_number(number: str, expected: str) -> bool:
    """Compare within the tolerance if the expected number has a point or an exponent; compare whole numbers as texts."""
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _close(float(number), float(expected))
    except ValueError:
        return False


def _close(number: float, expected: float) -> bool:
    return math.isclose(number, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(result: Any, expected: Any) -> bool:
    """Compare JSON values; numbers within a tolerance if one has a point."""
    if isinstance(expected, list):
        return isinstance(result, list) and len(result) == len(expected) and all(map(same_value, result, expected))
    if isinstance(expected, dict):
        return (
            isinstance(result, dict)
            and result.keys() == expected.keys()
            and all(same_value(result[key], value) for key, value in expected.items())
        )
    if isinstance(result, float) or isinstance(expected, float):
        numbers = isinstance(result, (int, float)) and isinstance(expected, (int, float))
        return numbers and _close(result, expected)
    return bool(result == expected)
