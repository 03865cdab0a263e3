"""Keys that identify a run: all except those whose type is marked otherwise.

`save_every: Annotated[int, HARMLESS] = 0` may change when a run is resumed: what is learned stays the same, up to rounding.
`train: Annotated[list[str], CONTENT]` names files: their content counts, not their location.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
FUNCTION = re.compile(r"(.+\.py):(\w+)")
"""A function in a user's file."""


class Counts(Enum):
    """How a key counts toward the identity of a run."""

    VALUE = "its value"
    CONTENT = "the content of the files that it names"
    HARMLESS = "not at all"


CONTENT, HARMLESS = Counts.CONTENT, Counts.HARMLESS


def key_of(name: str) -> str:
    """Return the key of a field: without the underscore of a name that Python reserves (`class_`)."""
    return name.removesuffix("_")


@dataclass(frozen=True)
class Leaf:
    """A key with a value, and no keys below it that the schema names."""

    key: str
    value: Any
    counts: Counts


hints_of: Callable[[Any], dict[str, Any]] = cache(partial(typing.get_type_hints, include_extras=True))
"""Cached types of a section's fields with their marks: every start needs them hundreds of times."""


def leaves(part: Any, section: str = "", counts: Counts = Counts.VALUE) -> Iterator[Leaf]:
    """Yield every key of a section (a dataclass) and of its subsections; a mark on a section applies to all of it."""
    for name, hint in hints_of(type(part)).items():
        value, key = getattr(part, name), f"{section}.{key_of(name)}".removeprefix(".")
        marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
        counted = next((mark for mark in marks if isinstance(mark, Counts)), counts)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, key, counted)
        else:
            yield Leaf(key, value, counted)


def with_absolute_paths(part: T) -> T:
    """Return the section with every existing path made absolute, so it does not depend on the working directory."""
    changed: dict[str, Any] = {}
    for name, hint in hints_of(type(part)).items():
        value = getattr(part, name)
        if dataclasses.is_dataclass(value):
            changed[name] = with_absolute_paths(value)
        else:
            changed[name] = _absolute(value, is_path=CONTENT in typing.get_args(hint))
    return dataclasses.replace(part, **changed)  # type: ignore[type-var]


def _absolute(value: Any, is_path: bool) -> Any:
    if isinstance(value, dict):
        return {_absolute(key, is_path): _absolute(item, is_path) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, is_path) for item in value]
    if not isinstance(value, str):
        return value
    if (match := FUNCTION.fullmatch(value)) and Path(match[1]).is_file():
        return f"{Path(match[1]).absolute()}:{match[2]}"
    return str(Path(value).absolute()) if is_path and Path(value).exists() else value
