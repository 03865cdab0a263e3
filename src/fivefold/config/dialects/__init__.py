"""Configurations in another framework's spelling: a dialect is a file here with a function `translate`, found by its name.

It runs before anything is checked, so what it returns is refused or accepted like a configuration in our own spelling.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fivefold.config.ranges import OneOf

Tree = dict[str, Any]
"""A configuration as nested mappings."""


@dataclass(frozen=True)
class Translation:
    """A configuration in our spelling."""

    tree: Tree
    overrides: list[str]
    """`a.b.c=value`, which come over the tree."""
    keys: dict[str, str] = field(default_factory=dict)
    """Key of the source -> what became of it: our key, or why there is none."""


Dialect = Callable[[Tree, list[str]], Translation]
"""The source's tree and overrides -> ours."""

OWN = "fivefold"
"""The dialect of a configuration that names no other."""


def find_dialect(name: str) -> Dialect:
    """The dialect of this name; raises ValueError where there is no file for it."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if fault := OneOf(known).fault(name):
        raise ValueError(f"the dialect of a configuration {fault}")
    translate: Dialect = importlib.import_module(f"{__name__}.{name}").translate
    return translate
