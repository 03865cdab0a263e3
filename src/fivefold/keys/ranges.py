"""Rules for a single value of the configuration: a range of numbers or a list of names, written on its field.

`lr: Annotated[float, at_least(0)] = 1e-6` is the whole declaration; `check_values` compares a section with its fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

from fivefold.errors import UserError, shown
from fivefold.keys.findings import Findings
from fivefold.keys.identity import hints_of, key_of
from fivefold.user_code import check_user_code, is_user_code

LARGEST = 2**53
"""Largest whole number: every library that receives one can represent it."""
FLOATS = 1e-37, 1e37
"""Smallest and largest absolute value of a nonzero float: computations use float32."""
RANKS = "[0, 1048576]"
"""Allowed numbers of ranks: more than any cluster has, and a list of them still fits in memory."""


@runtime_checkable
class Rule(Protocol):
    def fault(self, value: Any) -> str | None:
        """Return what the value must be, or None if it is valid."""
        ...


@dataclass(frozen=True)
class Range:
    """Finite numbers between two ends, which are included unless they are open."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return _is_usable(value) and above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        low, high = _plain(self.low), _plain(self.high)
        if self.high == math.inf:
            return f"{'above' if self.low_open else 'at least'} {low}"
        return f"in {'(' if self.low_open else '['}{low}, {high}{')' if self.high_open else ']'}"

    def fault(self, value: Any) -> str | None:
        return None if value in self else f"must be {self}: got {shown(value)}"


def _is_usable(value: float) -> bool:
    """Whether a number is finite and, if whole, at most 2^53, which every library can represent."""
    return abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value)


def _plain(number: float) -> str:
    return f"{number:.0f}" if abs(number) < 2**53 and number == int(number) else f"{number:g}"


def at_least(low: float) -> Range:
    return Range(low=low)


def above(low: float) -> Range:
    return Range(low=low, low_open=True)


def within(interval: str) -> Range:
    """Return the range of an interval: `[0, 1)` contains 0 but not 1."""
    low, high = interval[1:-1].split(",")
    return Range(float(low), float(high), interval.startswith("("), interval.endswith(")"))


@dataclass(frozen=True, eq=False)
class OneOf:
    """One of these names."""

    names: Collection[str]

    def fault(self, value: Any) -> str | None:
        # A list may be given, which no mapping has as a name.
        if value in list(self.names):
            return None
        return f"must be one of {', '.join(self.names)}; got {shown(value)}{suggest(value, self.names)}"


class NameOrCode(OneOf):
    """One of these names, or a user's function as `path.py:function`."""

    def fault(self, value: Any) -> str | None:
        if not is_user_code(value):
            known, close = ", ".join(self.names), suggest(value, self.names)
            return None if value in self.names else f"must be one of {known} or path.py:function: got {shown(value)}{close}"
        try:
            check_user_code(value)
        except UserError as error:
            return f": {error}"
        return None


@dataclass(frozen=True, eq=False)
class Matches:
    """A text that matches a pattern."""

    form: re.Pattern[str]
    description: str
    """The pattern as messages describe it."""

    def __str__(self) -> str:
        return self.description

    def fault(self, value: Any) -> str | None:
        return None if self.form.fullmatch(str(value)) else f"must be {self.description}: got {shown(value)}"


def suggest(value: Any, known: Iterable[Any], shown: Callable[[str], str] = str) -> str:
    """Return ": did you mean ...?" with the closest of the known names, formatted by `shown`; empty if none is close."""
    close = difflib.get_close_matches(str(value), [str(name) for name in known], n=1, cutoff=0.6)
    return f": did you mean {shown(close[0])!r}?" if close else ""


def check_values(part: Any, findings: Findings) -> None:
    """Check every value of a section (a dataclass) and of its subsections against the rules on its field."""
    for name, hint in hints_of(type(part)).items():
        value = getattr(part, name)
        if dataclasses.is_dataclass(value):
            check_values(value, findings.at(name))
            continue
        rules = _rules(hint)
        for key, item in _items(key_of(name), value):
            if isinstance(item, float) and not math.isfinite(item):
                findings.error(key, f"must be a finite number: got {item}")
            elif isinstance(item, int) and abs(item) > LARGEST:
                findings.error(key, f"must be at most {LARGEST}: got {shown(item)}")
            elif isinstance(item, str) and "\0" in item:
                findings.error(key, f"must have no character NUL: got {shown(item)}")
            elif item is not None:
                # In a field that takes a name, a function or a number, a range applies to the number only.
                applying = [rule for rule in rules if isinstance(item, (int, float)) or not isinstance(rule, Range)]
                faults = [fault for rule in applying if (fault := rule.fault(item))]
                if isinstance(item, float) and item and not FLOATS[0] <= abs(item) <= FLOATS[1] and not faults:
                    low, high = FLOATS
                    faults.append(f"must be 0 or of a size in [{low:g}, {high:g}], which float32 holds: got {item:g}")
                for fault in faults:
                    findings.error(key, fault)


def _rules(hint: Any) -> list[Rule]:
    """Return the rules on a type and on the types within it; a rule on a list's elements applies to each element."""
    if typing.get_origin(hint) is Annotated:
        inner, *marks = typing.get_args(hint)
        return [*_rules(inner), *(mark for mark in marks if isinstance(mark, Rule))]
    return [rule for inner in typing.get_args(hint) for rule in _rules(inner)]


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for the values in a list or mapping, or for the value itself."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _items(f"{name}.{key}", item)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _items(f"{name}[{place}]", item)
    else:
        yield name, value
