"""Assertions and the program they test, in two processes: the tests call the program, and only plain values return.

The program's process receives arguments, never the tests or what they expect, so nothing in it can be a verdict. What the
program returns is data. An object of its own class stays there, and tests cannot compare it with other values.
"""

from __future__ import annotations

import builtins
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from fivefold.reward.code import small_pytest
from fivefold.reward.code.plain import dumps, loads, refuse

NOT_TESTABLE = 3
"""Exit code of tests that pass the program a value that is not plain."""
_REQUESTS, _ANSWERS = 0, 3
"""File numbers of a program; the tests write to 3 and read from 0."""
_PIECE = 100
"""Number of items of an iterator per transfer."""
_LARGEST_MESSAGE = 16 << 20
_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__call__", "__str__", "__repr__", "__int__",
            "__float__", "__next__")  # fmt: skip
"""Operations of tests on an object that stays with the program. None is a verdict: no comparison, no truth value."""


class NotTestableError(BaseException):
    """Raised if the tests need more from a program than plain values."""


class NoAnswerError(BaseException):
    """Raised if the program has ended or its answer is invalid. It is not an Exception, so that no test can expect it."""


def serve(space: dict[str, Any]) -> None:
    """Answer calls of the tests with the program's names in `space`, until the tests end."""
    requests = os.fdopen(os.dup(_REQUESTS), encoding="utf-8")
    answers = open(_ANSWERS, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open as long as the process is
    objects: list[Any] = []

    def keep(value: Any) -> int:
        for place, other in enumerate(objects):
            if other is value:
                return place
        objects.append(value)
        return len(objects) - 1

    for line in requests:
        action, target, arguments, named = loads(line, objects.__getitem__)
        try:
            value = _done(space, action, target, arguments, named)
            answer = dumps(("value", value, arguments), keep)
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = dumps(("raised", names, str(error)))
        print(answer, file=answers, flush=True)


def _done(space: dict[str, Any], action: str, target: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    if action == "name":
        if target in space:
            return space[target](*arguments, **named)
        if "Solution" in space:
            return getattr(space["Solution"](), target)(*arguments, **named)
        raise NameError(f"name {target!r} is not defined")
    if action == "value":
        return space[target]
    if action == "get":
        return getattr(target, *arguments)
    if action == "set":
        return setattr(target, *arguments)
    if action == "iterator":
        return iter(target)
    if action == "iterate":
        return list(itertools.islice(target, *arguments))
    if not hasattr(type(target), action):
        raise TypeError(f"{type(target).__name__} has no {action}")
    return getattr(target, action)(*arguments, **named)


class _Line:
    """Connection of the tests to the program."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(_REQUESTS), "rb")
        self._requests = open(_ANSWERS, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        self._objects: dict[int, _Object] = {}

    def ask(self, action: str, target: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """Return the program's value; raise the program's exception as the nearest built-in exception."""
        try:
            request = dumps((action, target, list(arguments), named or {}), _place_of)
        except TypeError as error:
            raise NotTestableError(str(error)) from error
        try:
            print(request, file=self._requests, flush=True)
        except OSError as error:
            raise NoAnswerError(str(error)) from error
        try:
            line = self._answers.readline(_LARGEST_MESSAGE)
            kind, value, more = loads(line.decode(), self._object)
            raised = _exception(value, more) if kind == "raised" else None
            pairs = () if raised is not None else tuple(zip(arguments, more, strict=True))
        except (ValueError, TypeError, MemoryError) as wrong:
            raise NoAnswerError(str(wrong)) from wrong
        if raised is not None:
            raise raised
        for argument, left in pairs:
            _update(argument, left)
        return value

    def _object(self, place: int) -> _Object:
        return self._objects.setdefault(place, _Object(self, place))


class _Object:
    """Stand-in for an object that stays with the program."""

    def __init__(self, line: _Line, place: int) -> None:
        object.__setattr__(self, "_line", line)
        object.__setattr__(self, "_place", place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._line.ask("get", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("set", self, (name, value))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._line.ask("iterator", self)
        while piece := self._line.ask("iterate", iterator, (_PIECE,)):
            yield from piece

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise AssertionError("an object of the program's own class is not a plain value and cannot be compared")

    def __bool__(self) -> bool:
        raise AssertionError("an object of the program's own class is neither true nor false")

    __hash__ = object.__hash__


def _special(name: str) -> Callable[..., Any]:
    def method(self: _Object, *arguments: Any, **named: Any) -> Any:
        return self._line.ask(name, self, arguments, named)

    return method


for _name in _SPECIAL:
    setattr(_Object, _name, _special(_name))


def _place_of(value: Any) -> Any:
    return object.__getattribute__(value, "_place") if type(value) is _Object else refuse(value)


def _update(argument: Any, left: Any) -> None:
    """Apply the changes that a program made to an argument in place."""
    if type(argument) is list and type(left) is list:
        argument[:] = left
    elif type(argument) in (dict, set) and type(left) is type(argument):
        argument.clear()
        argument.update(left)


def _exception(names: Any, text: Any) -> Exception:
    """Return the nearest built-in exception for the program's exception, whose classes are `names`."""
    known = (getattr(builtins, str(name), None) for name in names)
    kind = next(
        (candidate for candidate in known if isinstance(candidate, type) and issubclass(candidate, Exception)), Exception
    )
    try:
        error: Exception = kind(str(text))
    except TypeError:
        error = Exception(str(text))
    error.names = [str(name) for name in names]  # type: ignore[attr-defined]
    return error


class _Name:
    """Stand-in for a function or class of the program."""

    def __init__(self, line: _Line, name: str) -> None:
        self._line, self.__name__ = line, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._line.ask("name", self.__name__, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._line.ask("get", self._line.ask("value", self.__name__), (name,))

    def __eq__(self, other: object) -> bool:
        raise AssertionError(f"{self.__name__} of the program is not a plain value and cannot be compared")

    __bool__ = _Object.__bool__
    __hash__ = object.__hash__


class _Module(types.ModuleType):
    """Stand-in for the module of `import solution`."""

    def __init__(self, line: _Line) -> None:
        super().__init__("solution")
        self._line = line

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(self._line, name)


def run_tests(tests: str, names: dict[str, str], space: dict[str, Any]) -> None:
    """Run assertions, then the test functions and classes that they define; raise what fails.

    `names`: local name -> name in the program, empty for the program itself.
    """
    line = _Line()
    sys.modules["pytest"] = small_pytest
    space |= {known_as: _Name(line, name) if name else _Module(line) for known_as, name in names.items()}
    try:
        exec(compile(tests, "<tests>", "exec"), space)  # noqa: S102
        for name, value in list(space.items()):
            if name.startswith("test_") and isinstance(value, types.FunctionType):
                small_pytest.call(value)
            elif isinstance(value, type) and value.__module__ == space["__name__"] and _is_test(name, value):
                _run_class(value)
    except NotTestableError:
        os._exit(NOT_TESTABLE)
    except SystemExit as ended:
        raise AssertionError("the tests ended by themselves") from ended


def _is_test(name: str, kind: type) -> bool:
    return name.startswith("Test") or any(base.__name__ == "TestCase" for base in kind.__mro__)


def _run_class(kind: type) -> None:
    is_unittest = hasattr(kind, "assertEqual")
    for name in [name for name in dir(kind) if name.startswith("test")]:
        instance = kind(name) if is_unittest else kind()
        getattr(instance, "setUp" if is_unittest else "setup_method", lambda: None)()
        small_pytest.call(getattr(instance, name))
