"""Plain values <-> JSON with their types: the format between a program and the tests that call it."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
from collections.abc import Callable
from typing import Any

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "complex": (complex, repr, complex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "large": (int, hex, lambda text: int(text, 16)),
}
_LARGE = 1 << 63
Keep = Callable[[Any], Any]
"""Function that encodes a value that is not plain, or raises TypeError."""


def refuse(value: Any) -> Any:
    """Raise TypeError: the `Keep` of an encoder for plain values only."""
    raise TypeError(f"not a plain value: {type(value).__name__}")


def dumps(value: Any, keep: Keep = refuse) -> str:
    """Return a value as JSON; objects of subclasses become those of the plain class, arrays lists."""
    return json.dumps(_encoded(value, keep))


def loads(text: str, kept_object: Callable[[int], Any] = refuse) -> Any:
    """Return the value of a JSON text; `kept_object` returns the stand-in of a kept object. Raise ValueError for any other
    text."""
    try:
        return _decoded(json.loads(text), kept_object)
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError) as error:
        raise ValueError(f"no plain value: {error}") from error


def _encoded(value: Any, keep: Keep) -> Any:
    if value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < _LARGE):
        return value
    if isinstance(value, list):
        return [_encoded(item, keep) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[_encoded(key, keep), _encoded(inner, keep)] for key, inner in dict.items(value)]}
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset), ("deque", collections.deque)):
        if isinstance(value, kind):
            return {name: [_encoded(item, keep) for item in value]}
    if isinstance(value, (range, slice)):
        return {type(value).__name__: [value.start, value.stop, value.step]}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    for name, (python_type, written, _) in _TEXTS.items():
        if isinstance(value, python_type):
            return {name: written(value)}
    if hasattr(type(value), "tolist"):
        # Arrays and their numbers.
        return _encoded(value.tolist(), keep)
    return {"kept": keep(value)}


def _decoded(value: Any, kept_object: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, kept_object) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "dict":
        return {_decoded(key, kept_object): _decoded(item, kept_object) for key, item in inner}
    if name in _SEQUENCES:
        return _SEQUENCES[name]([_decoded(item, kept_object) for item in inner])
    if name in ("range", "slice"):
        return (range if name == "range" else slice)(*inner)
    return kept_object(inner) if name == "kept" else _TEXTS[name][2](inner)
