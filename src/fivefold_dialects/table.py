"""Define a system's table: rows that say how each of its keys is handled, defaults, and the names of its methods, as data.

`tables/README.md` has the form of these files, `tables/SYSTEM.yaml` (`load`); the system's module has functions for values
that depend on several keys.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.resources import files
from typing import Any, Literal

import yaml

from fivefold_dialects.known import NONE, KnownKeys, sections
from fivefold_dialects.source import NULL, Source, flatten, typed

Convert = Callable[[Source, str], Any]
"""Function of the source and a key that returns our value, or None to keep our default."""
Derived = Callable[[Source], Mapping[str, Any]]
"""Function of the source that returns our keys and values; the value None keeps our default."""


@dataclass(frozen=True)
class Row:
    """Row for one key of a system: how it is handled here."""

    key: str
    form: Literal["to", "used", "fixed", "lacks"]
    ours: tuple[str, ...] = ()
    note: str = ""
    """Reason of the row, or a note about the conversion."""
    convert: Convert | None = None
    off: tuple[Any, ...] = ()
    """Values that turn the unsupported feature off; None is always one of them."""
    changes_result: bool = True
    takes_any: bool = False
    """Whether a row with a wildcard takes every key that it matches, known or not, if there is no list of those names."""

    @property
    def is_pattern(self) -> bool:
        return "*" in self.key

    def is_off(self, value: Any) -> bool:
        """Return whether a value turns the unsupported feature off; true is not the number 1."""
        return value in ([], {}) or any(value == off and (value is not True or off is True) for off in self.off)


@dataclass(frozen=True)
class Section:
    """Rows under one heading of the documentation, in an order that the system's users know."""

    title: str
    """Heading; empty if another system's page shows the rows."""
    rows: tuple[Row, ...]
    text: str = ""


@dataclass(frozen=True)
class Table:
    """Table of a system's configuration: rows, functions and defaults."""

    name: str
    """Name of the system as it spells it."""
    sections: tuple[Section, ...]
    derived: tuple[Derived, ...] = ()
    """Functions for values that depend on several keys; later ones override earlier ones."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> its default in the system, for keys that rows or functions read."""
    elsewhere: Mapping[str, Any] = field(default_factory=dict)
    """Keys that shared functions read and this program lacks -> a value, or `${key}` of the program; no run sets them."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Month of an older release -> its defaults that differ from today's."""
    release_of: Callable[[Mapping[str, Any]], str] = lambda settings: ""
    """Function that returns the month of the older release that settings were written for; "" for the current release."""
    known: KnownKeys = NONE
    """Keys that rows with a wildcard accept."""
    command: str = ""
    """Command with which the system's users start a run here."""
    loses: tuple[str, ...] = ()
    """Features of the system that are missing here."""
    gains: tuple[str, ...] = ()
    page_of: Table | None = None
    """Table of another system, whose page shows the rows that are the same here."""

    @cached_property
    def exact(self) -> dict[str, Row]:
        return {row.key: row for section in self.sections for row in section.rows if not row.is_pattern}

    @cached_property
    def patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        rows = [row for section in self.sections for row in section.rows if row.is_pattern]
        rows.sort(key=_exactness)
        return [(_pattern(row.key), row) for row in rows]

    def row(self, key: str) -> Row | None:
        """Return the row of a key: its own row, or the first row with a wildcard that matches and accepts it."""
        if key in self.exact:
            return self.exact[key]
        return next((row for pattern, row in self.patterns if pattern.fullmatch(key) and self._takes(row, key)), None)

    def is_section(self, key: str) -> bool:
        """Return whether the system has keys below this one."""
        return key in self._places or key in self.known.sections or self.row(f"{key}.x") is not None

    def _takes(self, row: Row, key: str) -> bool:
        """Return whether a row with a wildcard accepts a key: a known key, or the row's last name in a known section."""
        if row.takes_any or key in self.known:
            return True
        if "*" in row.key.rpartition(".")[2]:
            # A row that refuses may also accept a misspelt key.
            return row.form == "lacks"
        section = key.rpartition(".")[0]
        return not section or section in self._places or section in self.known.sections

    @cached_property
    def _places(self) -> frozenset[str]:
        """Return the sections of the keys that have their own row."""
        return frozenset(itertools.chain.from_iterable(map(sections, self.exact)))


def _exactness(row: Row) -> list[int]:
    """Return a sort key of a pattern: parts without wildcards come before `*`, and `*` before `**`."""
    return [3 if part == "**" else 2 if part == "*" else int("*" in part) for part in row.key.split(".")]


def _pattern(key: str) -> re.Pattern[str]:
    pieces = {"**": ".+", "*": "[^.]*"}
    return re.compile("".join(pieces.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", key)))


@dataclass(frozen=True)
class Choice:
    """Key whose value names a method, a loss or a mean, with the translation of each name, our keys or a single value."""

    key: str
    what: str
    names: Mapping[str, Any]
    default: str | None = None
    arguments: str = ""
    """Section whose keys are the choice's arguments: `$KEY` is one of them; a name refuses arguments it does not take."""
    lists: Mapping[str, str] = field(default_factory=dict)

    def name(self, source: Source) -> str | None:
        """Return the name in the source; report a name that is not listed and return None."""
        name = source.text(self.key) or self.default
        if name in self.names:
            return name
        source.lacks(self.key, f"the {self.what} {name}: known here are {', '.join(self.names)}")
        return None

    def read(self, source: Source) -> Any:
        """Return the translation of the source's name: our keys and values, or a single value; {} or None if not listed."""
        name = self.name(source)
        if name is None:
            return {} if isinstance(next(iter(self.names.values())), Mapping) else None
        chosen = self.names[name]
        if not isinstance(chosen, Mapping):
            return chosen
        _refuse(source, chosen, self.lists)
        section = source.under(f"{self.arguments}." if self.arguments else "")
        taken = set(several(chosen.get("takes", ""), self.lists))
        for key in section.keys("") if self.arguments else ():
            if key not in taken and section.value(key) is not None and section.value(key) is not False:
                section.lacks(key, f"an argument of the {self.what} {name}")
        return {ours: _value(section, value) for ours, value in chosen.items() if ours not in ("needs", "takes")}


def _refuse(source: Source, group: Mapping[str, Any], lists: Mapping[str, str] = {}) -> None:
    """Report the keys that a choice's name or a group does not support, in its `needs`."""
    for reason, keys in group.get("needs", {}).items():
        for row in _lacking("lacks", reason, keys, lists):
            if not replace(row, off=tuple(_value(source, off) for off in row.off)).is_off(source.value(row.key)):
                source.lacks(row.key, row.note)


def _value(source: Source, value: Any, converters: Mapping[str, Callable[..., Any]] = {}) -> Any:
    """Return a value of a choice or a group: `$key reader` is that key's value by this method of Source (`fields`)."""
    if isinstance(value, list):
        return [_value(source, item, converters) for item in value]
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    reference, _, usual = value[1:].partition(" or ")
    keys, *words = reference.split()
    key = source.first(*keys.split("|"))
    if "if-set" in words and not source.has(key):
        return None
    name = words[0] if words else "number"
    result = converters[name](source, key) if name in converters else getattr(source, name)(key)
    if usual == "null":
        return NULL if result is None else result
    if usual and not result:
        return typed(usual)
    return None if "if-true" in words and not result else result


@cache
def load(name: str) -> Mapping[str, Any]:
    """Return the mapping in `tables/NAME.yaml`; the name `legacy/NAME` means the file of older releases."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    place = name if "/" in name else f"tables/{name}"
    content: dict[str, Any] = yaml.load(files(__package__).joinpath(f"{place}.yaml").read_text(), loader)  # noqa: S506
    return content


def listed(name: str, of: str) -> frozenset[str]:
    """Return the names in a list of `tables/NAME.yaml`."""
    lists = load(name)["lists"]
    return frozenset(several(lists[of], lists))


def spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping of names, of which several in one text have the same value (`several`)."""
    return {name: value for names, value in values.items() for name in several(names)}


def choices(name: str) -> dict[str, Choice]:
    """Return the choices of `tables/NAME.yaml` by their key."""
    content = load(name)
    return {
        key: Choice(key, lists=content.get("lists", {}), **{**choice, "names": spelled_out(choice["names"])})
        for key, choice in content["choices"].items()
    }


def _word(what: str, names: Mapping[str, Any], source: Source, key: str) -> Any:
    """Return the value of the key's word; None if it is left out, or not in `names`, which is reported."""
    word = source.text(key)
    if word is not None and word not in names:
        source.lacks(key, f"the {what} {word}: known here are {', '.join(names)}")
    return None if word is None else names.get(word)


def _words(content: Mapping[str, Any]) -> dict[str, Convert]:
    """Return the functions that read the words in a file's section `words`."""
    return {name: partial(_word, name, spelled_out(values)) for name, values in content.get("words", {}).items()}


def fields(name: str, converters: Mapping[str, Callable[..., Any]] = {}) -> dict[str, Callable[[Source], dict[str, Any]]]:
    """Return the functions that read the groups of `tables/NAME.yaml`: keys that have a value of ours only in some runs."""
    content = load(name)
    every = {**_words(content), **converters}
    return {title: partial(_read_group, group, every) for title, group in content["fields"].items()}


def when(applies: Callable[[Source], bool], *functions: Derived) -> tuple[Derived, ...]:
    """Return functions that give the values of `functions` in runs to which they apply, and none in other runs."""
    return tuple(partial(_when, applies, function) for function in functions)


def _when(applies: Callable[[Source], bool], function: Derived, source: Source) -> Mapping[str, Any]:
    return function(source) if applies(source) else {}


_OF_A_GROUP = ("from", "when", "else", "needs")


def _read_group(group: Mapping[str, Any], converters: Mapping[str, Callable[..., Any]], source: Source) -> dict[str, Any]:
    section = source.under(group.get("from", ""))
    tests = (converters[test](source) if test in converters else _value(section, test) for test in group.get("when", []))
    if not all(tests):
        return dict(group.get("else", {}))
    _refuse(section, group)
    return {ours: _value(section, value, converters) for ours, value in group.items() if ours not in _OF_A_GROUP}


def table(
    name: str | Mapping[str, Any],
    derived: Sequence[Derived] = (),
    converters: Mapping[str, Convert] = {},
    older: Mapping[str, Any] = {},
    **fields: Any,
) -> Table:
    """Return the Table of `tables/NAME.yaml`, or of the content of such a file, with the system's functions.
    `converters` are functions that rows `to` name, in addition to the methods of Source; `older` has versions and sections
    from before 2026 (`legacy/`); `fields` are further fields of Table."""
    content = load(name) if isinstance(name, str) else name
    content = {**content, **{part: content.get(part, {}) | older.get(part, {}) for part in ("versions", "sections")}}
    rows = tuple(_sections(content, converters))
    rows += tuple(_below(content, Table("", rows)))
    texts = {key: content[key] for key in ("command", "loses", "gains") if key in content}
    versions = {month: defaults_of(changed) for month, changed in content.get("versions", {}).items()}
    return Table(
        content["name"], rows, tuple(derived), defaults_of(content.get("defaults", {})), versions=versions,
        **texts, **fields,
    )  # fmt: skip


def defaults_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return full key -> value of nested defaults, where one text may be several keys (`several`)."""
    return spelled_out(dict(flatten(tree)))


def several(text: str, lists: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the keys in a text: `(a b).(c d)` gives a.c, a.d, b.c and b.d; `$name` is an entry of `lists`."""
    if lists:
        text = re.sub(r"\$(\w+)", lambda name: " ".join(several(lists[name[1]], lists)), text)
    yield from _expanded(iter(re.findall(r"[()]|\s+|[^\s()]+", text)))


def _expanded(tokens: Iterator[str]) -> list[str]:
    """Return the keys of a text up to its end or to the closing parenthesis."""
    done: list[str] = []
    word = [""]
    for token in tokens:
        if token == ")":
            break
        if token.isspace():
            done, word = done + word, [""]
        else:
            ends = _expanded(tokens) if token == "(" else [token]
            word = [start + end for start in word for end in ends]
    return [key for key in done + word if key]


def _sections(content: Mapping[str, Any], converters: Mapping[str, Convert]) -> Iterator[Section]:
    """Yield the sections of a file, its own and those copied from other files, where the first row of a key counts."""
    taken: set[str] = set()
    named = {listed: load(listed) for listed in content["sections"].values() if isinstance(listed, str)}
    lists = dict(item for listed in (*named.values(), content) for item in listed.get("lists", {}).items())
    converters = dict(item for listed in (*named.values(), content) for item in _words(listed).items()) | dict(converters)
    # The file's own rows come first, because they replace copied ones.
    for title, listed in sorted(content["sections"].items(), key=lambda item: isinstance(item[1], str)):
        section = _section(title, named[listed]["sections"][title] if isinstance(listed, str) else listed, lists, converters)
        if isinstance(listed, str):
            rows = {row.key: row for row in reversed(section.rows) if row.key not in taken}
            section = replace(section, rows=tuple(rows.values())[::-1])
        else:
            taken.update(row.key for row in section.rows)
        yield section


def _below(content: Mapping[str, Any], table: Table) -> Iterator[Section]:
    """Yield rows `fixed`, `lacks` and `slower` of another system's file, for its keys below a key of this system."""
    for start, (name, *titles) in content.get("below", {}).items():
        other = load(name)
        for title in titles:
            forms = {form: rows for form, rows in other["sections"][title].items() if form in ("fixed", "lacks", "slower")}
            rows = (replace(row, key=f"{start}.{row.key}") for row in _section(title, forms, other["lists"], {}).rows)
            yield Section("", tuple(row for row in rows if row.is_pattern or table.row(row.key) is None))


def _section(title: str, rows: Mapping[str, Any], lists: Mapping[str, str], converters: Mapping[str, Convert]) -> Section:
    done: list[Row] = []
    for key, target in (rows.get("to") or {}).items():
        text, note = target if isinstance(target, list) else (target, "")
        ours, _, name = text.partition(" ")
        convert = converters[name] if name in converters else getattr(Source, name or "value")
        done += [Row(single, "to", (ours,), note, convert) for single in several(key, lists)]
    for keys, note in (rows.get("reads") or {}).items():
        done += [_row(key, "used", note=note or "") for key in several(keys, lists)]
    for reason, keys in (rows.get("fixed") or {}).items():
        done += [_row(key, "fixed", note=reason) for key in several(keys, lists)]
    for form in ("lacks", "slower"):
        for reason, keys in (rows.get(form) or {}).items():
            done += _lacking(form, reason, keys, lists)
    return Section(title, tuple(done), rows.get("text", ""))


def _lacking(form: str, reason: str, keys: str | list[Any], lists: Mapping[str, str]) -> list[Row]:
    text, *off = keys if isinstance(keys, list) else [keys]
    return [
        _row(key, "lacks", note=reason, off=(None, *off), changes_result=form == "lacks") for key in several(text, lists)
    ]


def _row(key: str, form: Literal["used", "fixed", "lacks"], **fields: Any) -> Row:
    return Row(key.removesuffix("!"), form, takes_any=key.endswith("!"), **fields)
