"""The form of a dialect's table: rows that say what becomes of a system's keys, and functions for what several keys say.

    to("data.prompt_key", "data.prompt_key")                    a value, perhaps converted
    used("trainer.nnodes", "policy.backend")                    a function of several keys (Table.derived) reads it
    fixed("trainer.balance_batch", "samples are always ...")    whatever it says, the numbers of the run are the same
    lacks("actor.use_x", "...", off=[False])                    not supported, where it is not switched off

Several keys may stand in one text. In a key `*` stands for one of its parts and `**` for any number of them, where the
system knows the key (known/): another one is unknown, as it is without the row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from fivefold.config.dialects.known import NONE, KnownKeys, sections
from fivefold.config.dialects.source import Source

Convert = Callable[[Source, str], Any]
"""The source and a key -> our value, or None to leave ours as it is."""
Derived = Callable[[Source], Mapping[str, Any]]
"""The source -> our keys and values; None leaves ours as it is."""


@dataclass(frozen=True)
class Row:
    """What becomes of a key."""

    key: str
    form: Literal["to", "used", "fixed", "lacks"]
    ours: tuple[str, ...] = ()
    note: str = ""
    """The reason, or what is worth knowing of the conversion."""
    convert: Convert | None = None
    off: tuple[Any, ...] = ()
    """Values at which what we lack is not asked for; None is always one of them."""
    changes_result: bool = True
    takes_any: bool = False
    """Of a row with a wildcard: whatever it fits is taken, known or not, because there is no list of those names."""

    @property
    def is_pattern(self) -> bool:
        return "*" in self.key


def to(key: str, ours: str, convert: Convert | None = None, note: str = "") -> Row:
    """The value of `key`, which `convert` reads (as it stands when left out), is that of our key."""
    return Row(key, "to", (ours,), note, convert or Source.value)


def used(keys: str | Sequence[str], ours: str | Sequence[str], note: str = "", *, takes_any: bool = False) -> list[Row]:
    """A function of the table reads these keys for ours; where it does not, they say nothing."""
    return [Row(key, "used", _several(ours), note, takes_any=takes_any) for key in _several(keys)]


def fixed(keys: str | Sequence[str], reason: str, *, takes_any: bool = False) -> list[Row]:
    """These keys change nothing of the numbers here."""
    return [Row(key, "fixed", note=reason, takes_any=takes_any) for key in _several(keys)]


def lacks(keys: str | Sequence[str], reason: str, off: Sequence[Any] = (), *, changes_result: bool = True) -> list[Row]:
    """These keys ask for what is not supported, unless their value is one of `off`."""
    return [Row(key, "lacks", note=reason, off=(None, *off), changes_result=changes_result) for key in _several(keys)]


def slower(keys: str | Sequence[str], reason: str, off: Sequence[Any] = ()) -> list[Row]:
    """As `lacks`, where the numbers of the run are the same without it."""
    return lacks(keys, reason, off, changes_result=False)


def below(starts: str | Sequence[str], names: str | Sequence[str]) -> tuple[str, ...]:
    """Every one of the names with every one of the beginnings before it."""
    return tuple(start + name for start in _several(starts) for name in _several(names))


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names, or one text with white space between them."""
    return tuple(names.split()) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class Section:
    """Rows under a heading of the documentation, in the order in which that system's users think."""

    title: str
    rows: tuple[Row, ...]
    text: str = ""

    @classmethod
    def of(cls, title: str, *rows: Row | Sequence[Row], text: str = "") -> Section:
        return cls(title, tuple(row for each in rows for row in ([each] if isinstance(each, Row) else each)), text)

    def under(self, prefix: str) -> Section:
        """The same with `prefix` before every key."""
        return replace(self, rows=tuple(replace(row, key=prefix + row.key) for row in self.rows))


@dataclass(frozen=True)
class Table:
    """All that is known of a system's configuration."""

    name: str
    """As the system writes itself."""
    sections: tuple[Section, ...]
    derived: tuple[Derived, ...] = ()
    """Later ones come over earlier ones."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> what it is when a configuration leaves it out, as far as a row or function asks for it."""
    elsewhere: Mapping[str, Any] = field(default_factory=dict)
    """Keys of another program that functions shared with it read, with the key of this one that stands for each, or the
    value that it has here; nobody can set them."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Month of an older release -> defaults that were others then."""
    release_of: Callable[[Mapping[str, Any]], str] = lambda settings: ""
    """The month of the release that settings show by what no later one has; "" where they may be today's."""
    known: KnownKeys = NONE
    """Keys that rows with a wildcard take."""
    command: str = ""
    """How its users start a run, in our command."""
    loses: tuple[str, ...] = ()
    """What they do without here."""
    gains: tuple[str, ...] = ()

    @cached_property
    def exact(self) -> dict[str, Row]:
        return {row.key: row for section in self.sections for row in section.rows if not row.is_pattern}

    @cached_property
    def patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        found = [row for section in self.sections for row in section.rows if row.is_pattern]
        return [(_pattern(row.key), row) for row in found]

    def row(self, key: str) -> Row | None:
        """The row of a key: its own, or the first with a wildcard that fits and takes it."""
        if key in self.exact:
            return self.exact[key]
        return next((row for pattern, row in self.patterns if pattern.fullmatch(key) and self._takes(row, key)), None)

    def _takes(self, row: Row, key: str) -> bool:
        """What the system knows; where the row has the last name itself, the section must be one of the system's."""
        if row.takes_any or key in self.known:
            return True
        if "*" in row.key.rpartition(".")[2]:
            # A row that refuses may take what is misspelt too.
            return row.form == "lacks"
        section = key.rpartition(".")[0]
        return not section or section in self._places or section in self.known.sections

    @cached_property
    def _places(self) -> frozenset[str]:
        """Sections of keys with a row of their own."""
        return frozenset(itertools.chain.from_iterable(map(sections, self.exact)))


def _pattern(key: str) -> re.Pattern[str]:
    pieces = {"**": ".+", "*": "[^.]*"}
    return re.compile("".join(pieces.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", key)))
