"""Subset of pytest for assertion tests: approx, raises, parametrize. It replaces pytest even if that is installed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from fivefold.reward.code.untestable import Untestable, refuse_tests


class approx:  # noqa: N801 - pytest's name
    """Equal to values within a tolerance: numbers, and numbers in sequences and mappings."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self._nan_ok = expected, nan_ok
        self._rel = 1e-6 if rel is None and abs is None else rel or 0.0
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, result: object) -> bool:
        return self._near(result, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, result: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            same = isinstance(result, Mapping) and result.keys() == expected.keys()
            return same and all(self._near(result[key], value) for key, value in expected.items())
        if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
            same = isinstance(result, Sequence) and not isinstance(result, (str, bytes)) and len(result) == len(expected)
            return same and all(map(self._near, result, expected))
        if isinstance(expected, bool) or expected is None or isinstance(expected, (str, bytes)):
            return bool(result == expected)
        if hasattr(expected, "tolist"):
            return self._near(result, expected.tolist())
        if isinstance(result, (str, bytes, Mapping, Sequence)) or result is None:
            return False
        if result == expected:
            return True
        if isinstance(expected, float) and math.isnan(expected):
            return self._nan_ok and isinstance(result, float) and math.isnan(result)
        if any(isinstance(number, float) and not math.isfinite(number) for number in (result, expected)):
            return False
        return bool(abs(result - expected) <= max(self._rel * abs(expected), self._abs))


class raises:  # noqa: N801 - pytest's name
    """A block, or a call, that must raise."""

    value: BaseException | None = None
    _kinds: tuple[Any, ...]
    _match: str | None

    def __new__(cls, kinds: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
        context = super().__new__(cls)
        context._kinds, context._match = kinds if isinstance(kinds, tuple) else (kinds,), match
        if not call:
            return context
        with context:
            call[0](*call[1:], **named)
        return context

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            raise AssertionError("nothing was raised")
        names = getattr(error, "names", [])
        # The program's exception arrives as the nearest built-in exception: its own class is matched by its name.
        is_kind = isinstance(error, tuple(expected for expected in self._kinds if isinstance(expected, type)))
        if not is_kind and not any(expected.__name__ in names for expected in self._kinds):
            return False
        self.value, self.type = error, kind
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{self._match!r} is not in {str(error)!r}")
        return True


def fail(reason: str = "", **named: Any) -> NoReturn:
    raise AssertionError(reason)


class _Mark:
    """`pytest.mark`: parametrize acts, marks that decide whether a test runs are refused, and the others have no effect."""

    @staticmethod
    def parametrize(names: str | Sequence[str], rows: Iterable[Any], **more: Any) -> Callable[[Any], Any]:
        """Call a test once for each row."""
        columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        table = [dict(zip(columns, row if len(columns) > 1 else [row], strict=True)) for row in rows]

        def decorate(test: Any) -> Any:
            test.rows = [{**one, **other} for one in getattr(test, "rows", [{}]) for other in table]
            return test

        return decorate

    def __getattr__(self, name: str) -> Any:
        if name in ("skip", "skipif", "xfail", "usefixtures"):
            refuse_tests(Untestable.PYTEST)
        return lambda *positional, **named: positional[0] if positional and callable(positional[0]) else lambda test: test


mark = _Mark()


def param(*values: Any, **named: Any) -> Any:
    return values if len(values) > 1 else values[0]


def __getattr__(name: str) -> NoReturn:
    """Refuse tests that use another part of pytest. Python looks for the names with underscores itself."""
    if name.startswith("__"):
        raise AttributeError(name)
    refuse_tests(Untestable.PYTEST)
