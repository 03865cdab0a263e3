"""Typed sections from plain values: mappings -> dataclasses, or an error that says what to write instead."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from fivefold.errors import shown
from fivefold.keys.findings import Findings
from fivefold.keys.identity import key_of
from fivefold.keys.ranges import suggest

T = TypeVar("T")

_plain_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""Cached types of a section's fields without their marks."""


def make(cls: type[T], value: Any, findings: Findings) -> T | None:
    """Make an instance of dataclass `cls` from a mapping; errors are collected, not raised, and the result is then None.

    An instance is returned as it is.
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, dict):
        findings.error("" if findings.section else "the file", f"must be a mapping of keys, got {shown(value)}")
        return None
    hints = _plain_hints(cls)
    fields = {key_of(field.name): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    # `dataclasses.asdict` returns names that Python reserves with their underscore.
    reserved = {field.name: key for key, field in fields.items() if key != field.name}
    arguments: dict[str, Any] = {}
    before = len(findings.errors)
    for spelling, item in value.items():
        key = reserved.get(spelling, spelling)
        if key in fields:
            # null is what a key that is left out has.
            is_null = item is None and fields[key].default is None
            name = fields[key].name
            arguments[name] = None if is_null else _convert(hints[name], item, findings.at(key))
        else:
            close = suggest(key, fields, findings.key)
            findings.unknown(str(key), close or f"; known here: {', '.join(fields)}")
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in value:
            if dataclasses.is_dataclass(hints[field.name]):
                # Building an empty section reports its keys that have no default.
                make(hints[field.name], {}, findings.at(key))
            else:
                findings.error(key, "is required: it has no default")
    if len(findings.errors) > before:
        return None
    return cls(**arguments)


def _convert(hint: Any, value: Any, findings: Findings) -> Any:
    """Convert `value` to the type `hint`; YAML's loose spellings (1e-6 as text, ints for floats) are accepted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        if value is None and type(None) in arguments:
            return None
        if len(options) == 1:
            return _convert(options[0], value, findings)
        for option in options:
            trial = Findings()
            converted = _convert(option, value, trial)
            if not trial.errors:
                return converted
    elif origin is typing.Literal:
        if value in arguments:
            return value
        findings.error("", f"must be one of {', '.join(map(str, arguments))}; got {shown(value)}{suggest(value, arguments)}")
        return None
    elif origin is list:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and arguments[0] is str:
            value = [value]
        if isinstance(value, list):
            return [_convert(arguments[0], item, findings.at(f"[{place}]")) for place, item in enumerate(value)]
        findings.error("", f"must be a list, got {shown(value)}")
        return None
    elif origin is dict:
        if isinstance(value, dict):
            keys = [str(key) if arguments[0] is str else _convert(arguments[0], key, findings.at(str(key))) for key in value]
            items = [_convert(arguments[1], item, findings.at(str(key))) for key, item in value.items()]
            return dict(zip(keys, items, strict=True))
        findings.error("", f"must be a mapping, got {shown(value)}")
        return None
    elif dataclasses.is_dataclass(hint):
        return make(typing.cast(type[Any], hint), value, findings)
    elif hint is Any:
        return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
    elif hint is str:
        # A key that takes `path.py:function` takes the function itself; the rule of any other key refuses it.
        if isinstance(value, str) or callable(value):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    findings.error("", f"must be {_describe(hint)}, got {shown(value)}")
    return None


def _describe(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if dataclasses.is_dataclass(hint):
        return "a mapping of keys"
    return names.get(hint, str(hint))
