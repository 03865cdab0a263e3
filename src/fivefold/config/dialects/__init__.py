"""Configurations in another framework's spelling: a dialect is a file here with a function `translate`, found by its name.

It runs before anything is checked, so what it returns is refused or accepted like a configuration in our own spelling. The
dialects of other systems are tables (table.py) that one translator reads (translator.py).
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from fivefold.config.ranges import OneOf

Tree = dict[str, Any]
"""A configuration as nested mappings."""

Kind = Literal["translated", "fixed", "unsupported", "unknown"]
"""What became of a key: a key of ours has its value; it is so here whatever it says, or says nothing here; we lack it."""

REFUSED = "refused"
"""The key with which the YAML of a run begins that lacks settings of its source: the loader refuses it."""
_SECRET = re.compile(r"(api|access|secret|private)_?key$|token$|password$|secret$", re.IGNORECASE)
"""Ends of the names of keys whose values are secrets."""


@dataclass(frozen=True)
class Outcome:
    """What became of one key of the source."""

    key: str
    value: Any
    kind: Kind
    reason: str = ""
    ours: tuple[str, ...] = ()
    """Our keys that its value went into."""
    changes_result: bool = True
    """Of what is unsupported: the numbers of the run would be others; otherwise only speed, memory or what is shown."""

    @property
    def shown(self) -> Any:
        """The value for terminals and files of a run, where a secret has no place."""
        hides = isinstance(self.value, str) and _SECRET.search(self.key.rpartition(".")[2])
        return "***" if hides else self.value

    @property
    def is_refused(self) -> bool:
        return self.kind == "unknown" or (self.kind == "unsupported" and self.changes_result)


@dataclass(frozen=True)
class Line:
    """One of our keys and where its value comes from."""

    key: str
    value: Any
    sources: tuple[str, ...] = ()
    """Keys that the source sets; empty where the value is the other system's default."""


@dataclass(frozen=True)
class Translation:
    """A configuration in our spelling."""

    tree: Tree
    overrides: list[str]
    """`a.b.c=value`, which come over the tree."""
    keys: dict[str, str] = field(default_factory=dict)
    """Key of the source -> what became of it: our key, or why there is none."""
    lines: list[Line] = field(default_factory=list)
    """The tree key by key, where a table made it."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Every key of the source, where a table was read."""
    faults: list[str] = field(default_factory=list)
    """Values that cannot be read, one sentence each."""
    notes: list[str] = field(default_factory=list)
    """Sentences about the run that users of the other system should read."""
    release: str = ""
    """The month of the system's release whose defaults were taken, where they are not today's."""

    @property
    def refusals(self) -> list[str]:
        """Everything that keeps the run from being the one that was asked for, one sentence each."""
        return [
            *self.faults,
            *(f"{each.key}={each.shown}: {each.reason}" for each in self.outcomes if each.is_refused),
        ]


Dialect = Callable[[Tree, list[str]], Translation]
"""The source's tree and overrides -> ours."""

OWN = "fivefold"
"""The dialect of a configuration that names no other."""
SYSTEMS = ("verl", "siirl", "trinity", "roll", "areal", "skyrl")
"""Systems with a table, in the order of the documentation."""


def merged(trees: Iterable[Tree]) -> Tree:
    """Mappings one over the other, the last on top."""
    found: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged([found[key], value]) if both else value
    return found


def find_dialect(name: str) -> Dialect:
    """The dialect of this name; raises ValueError where there is no file for it."""
    known = sorted(
        module.name
        for path in __path__
        for module in pkgutil.iter_modules([path])
        if module.name in (*SYSTEMS, OWN) or path != __path__[0]
    )
    if fault := OneOf(known).fault(name):
        raise ValueError(f"the dialect of a configuration {fault}")
    translate: Dialect = importlib.import_module(f"{__name__}.{name}").translate
    return translate
