"""Dialects: programs that read the configuration of another system as one of ours.

A dialect runs before anything is checked, so its result is refused or accepted like a configuration in our own spelling.
Packages name their dialects in the entry point group `fivefold.dialects`; the core knows no system by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol, cast

from fivefold.errors import UserError
from fivefold.keys.ranges import OneOf

Tree = dict[str, Any]
"""A configuration as nested mappings."""

Kind = Literal["translated", "fixed", "unsupported", "unknown"]
"""Outcome of a key: one of our keys has its value; it has no effect here, or only one value is possible; it is not
supported; it is not known."""

REFUSED = "refused"
"""The key with which the YAML of a run begins that lacks settings of its source: the loader refuses it."""
_SECRET = re.compile(r"(api|access|secret|private)_?key$|token$|password$|secret$", re.IGNORECASE)
"""Ends of the names of keys whose values are secrets."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one key of the source configuration."""

    key: str
    value: Any
    kind: Kind
    reason: str = ""
    ours: tuple[str, ...] = ()
    """Our keys that its value went into."""
    changes_result: bool = True
    """Whether an unsupported key changes the numbers of a run; otherwise it changes only speed, memory or output."""

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
        """Everything that keeps the run from being the one that the configuration describes, one sentence each."""
        return [
            *self.faults,
            *(f"{outcome.key}={outcome.shown}: {outcome.reason}" for outcome in self.outcomes if outcome.is_refused),
        ]


GROUP = "fivefold.dialects"
"""The group of entry points: the name of a system -> its dialect."""
OWN = "fivefold"
"""The dialect of a configuration that names no other."""


class Dialect(Protocol):
    """A function from a configuration of another system to ours."""

    def __call__(self, tree: Tree, overrides: list[str], /) -> Translation:
        """Translate nested mappings and `a.b.c=value` words."""
        ...


class SystemDialect(Dialect, Protocol):
    """A dialect that also reads the system's commands and shows what became of them, for `--from SYSTEM`."""

    def translate_words(
        self, words: Sequence[str], environment: Mapping[str, str], given: Mapping[str, str] = {}, *, version: str = ""
    ) -> Translation:
        """Translate the words of a command; raises ConfigError if they describe no run.

        A variable of the environment that may be a secret by its name is hidden, unless it is among the `given` ones.
        """
        ...

    def write(self, translation: Translation, *, strict: bool = True) -> str:
        """Return the translated run as a commented YAML file."""
        ...

    def notes(self, translation: Translation) -> list[str]:
        """Return sentences about the translated run for the terminal, the first with the counts of keys."""
        ...


def as_written(tree: Tree, overrides: list[str]) -> Translation:
    """Return a configuration in our spelling as it was written."""
    return Translation(tree, overrides)


def find_dialect(name: str) -> Dialect:
    """Return the dialect of this name; raises ValueError if no installed package has it."""
    if name == OWN:
        return as_written
    installed = entry_points(group=GROUP)
    if fault := OneOf(sorted({OWN, *installed.names})).fault(name):
        raise UserError(f"the dialect of a configuration {fault}")
    return cast(Dialect, installed[name].load())


def find_system(name: str) -> SystemDialect:
    """Return the dialect that reads the commands of this system; raises ValueError if no installed package has it."""
    if fault := OneOf(sorted(entry_points(group=GROUP).names)).fault(name):
        raise UserError(f"--from {fault}")
    return cast(SystemDialect, find_dialect(name))
