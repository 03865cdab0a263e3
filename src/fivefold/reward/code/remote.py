"""Assertions and the program they test, in two processes: the tests call the program, and only plain values return.

The program's process receives arguments, never the tests or what they expect, so nothing in it can be a verdict. What the
program returns is data. An object of its own class stays there, and tests cannot compare it with other values.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from fivefold.reward.code import small_pytest
from fivefold.reward.code.plain import dumps, loads, refuse
from fivefold.reward.code.untestable import Untestable, refuse_tests

_REQUESTS, _ANSWERS = 0, 3
"""File numbers of a program; the tests write to 3 and read from 0."""
_PIECE = 100
"""Number of items of an iterator per transfer."""
_LARGEST_MESSAGE = 16 << 20
_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__call__", "__str__", "__repr__", "__int__",
            "__float__", "__next__", "__enter__")  # fmt: skip
"""Operations of tests on an object that stays with the program. None is a verdict: no comparison, no truth value."""


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
            answer = dumps(("value", value, [*arguments, *named.values()]), keep)
        except (Exception, SystemExit) as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = dumps(("raised", names, error.code if isinstance(error, SystemExit) else str(error)))
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


_OUTCOMES = ("__unittest_skip__", "__unittest_expecting_failure__")
"""Marks of unittest's on tests that do not pass by running to their end."""


class _Line:
    """Connection of the tests to the program."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(_REQUESTS), "rb")
        self._requests = open(_ANSWERS, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        self._objects: dict[int, _Object] = {}
        self.is_used = False
        """True after the first request to the program."""

    def ask(self, action: str, target: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """Return the program's value; raise the program's exception as the nearest built-in exception.

        If the program has ended or its answer is invalid, this process ends: tests could expect any exception.
        """
        self.is_used = True
        named = named or {}
        try:
            request = dumps((action, target, list(arguments), named), _place_of)
        except TypeError:
            refuse_tests(Untestable.ARGUMENT)
        try:
            print(request, file=self._requests, flush=True)
            line = self._answers.readline(_LARGEST_MESSAGE)
            kind, value, more = loads(line.decode(), self._object)
            raised = _exception(value, more) if kind == "raised" else None
            pairs = () if raised is not None else tuple(zip([*arguments, *named.values()], more, strict=True))
        except (OSError, ValueError, TypeError, MemoryError):
            os._exit(1)
        if isinstance(raised, StopIteration) and action != "__next__":
            # As in generators (PEP 479): loops, `map` and `all` over calls would take it for their end.
            raised = _with_names(RuntimeError(str(raised)), value)
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # An error in the block may be the verdict: the program neither receives nor suppresses it.
        if kind is None:
            self._line.ask("__exit__", self, (None, None, None))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is _Object:
            refuse_tests(Untestable.COMPARISON)
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


def _exception(names: Any, argument: Any) -> BaseException:
    """Return the nearest built-in exception for the program's exception, whose classes are `names`."""
    known = (getattr(builtins, str(name), None) for name in names)
    kinds = (candidate for candidate in known if isinstance(candidate, type))
    kind = next((candidate for candidate in kinds if issubclass(candidate, (Exception, SystemExit))), Exception)
    try:
        error: BaseException = kind(argument)
    except TypeError:
        error = Exception(argument)
    return _with_names(error, names)


def _with_names(error: BaseException, names: Any) -> BaseException:
    """Return an exception with the names of the program's classes, by which `raises` matches it."""
    error.names = [str(name) for name in names]  # type: ignore[attr-defined]
    return error


class _Name:
    """Stand-in for a function or class of the program."""

    def __init__(self, line: _Line, name: str) -> None:
        object.__setattr__(self, "_line", line)
        object.__setattr__(self, "__name__", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("set", self._line.ask("value", self.__name__), (name, value))

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
        _run_collected(space)
    except SystemExit as ended:
        raise AssertionError("the tests ended by themselves") from ended
    if not line.is_used:
        refuse_tests(Untestable.NO_CALL)


def _run_collected(space: dict[str, Any]) -> None:
    """Run the test functions and classes in `space`, with the functions that pytest and unittest call around them."""
    module = types.SimpleNamespace(**space)
    _call_hooks(module, ("setUpModule", "setup_module"), module)
    for name, value in list(space.items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            _call_hooks(module, ("setup_function",), value)
            _call(value)
            _call_hooks(module, ("teardown_function",), value)
        elif isinstance(value, type) and value.__module__ == space["__name__"] and _is_test(name, value):
            _run_class(value)
    _call_hooks(module, ("tearDownModule", "teardown_module"), module)


def _is_test(name: str, kind: type) -> bool:
    # As in pytest, a class with a constructor of its own is a helper.
    is_plain = name.startswith("Test") and vars(kind).get("__init__") is None
    return is_plain or any(base.__name__ == "TestCase" for base in kind.__mro__)


def _run_class(kind: type) -> None:
    is_unittest = hasattr(kind, "assertEqual")
    _call_hooks(kind, ("setUpClass", "setup_class"), kind)
    for name in [name for name in dir(kind) if name.startswith("test")]:
        instance = kind(name) if is_unittest else kind()
        test = getattr(instance, name)
        _call_hooks(instance, ("setUp", "setup_method"), test)
        _call(test)
        _call_hooks(instance, ("tearDown", "teardown_method"), test)
    _call_hooks(kind, ("tearDownClass", "teardown_class"), kind)


def _call_hooks(owner: Any, names: tuple[str, ...], argument: Any) -> None:
    """Call the functions of these names that a module, class or instance has, with `argument` if they take one."""
    for name in names:
        if (hook := getattr(owner, name, None)) is not None:
            hook(*([argument] if inspect.signature(hook).parameters else []))


def _call(test: Callable[..., Any]) -> None:
    """Call a test once for each row of its parameters; refuse tests that need fixtures or that calling does not run."""
    for row in getattr(test, "rows", [{}]):
        try:
            inspect.signature(test).bind(**row)
        except TypeError:
            refuse_tests(Untestable.FIXTURE)
        if any(hasattr(test, mark) for mark in _OUTCOMES):
            refuse_tests(Untestable.PYTEST)
        if inspect.isgenerator(result := test(**row)) or inspect.iscoroutine(result):
            refuse_tests(Untestable.NO_CALL)
