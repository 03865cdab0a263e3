"""The form of a system's table: rows that say what becomes of its keys, defaults, and the names of its methods, as data.

`tables/SYSTEM.yaml` has them (`load`), the system's module has functions for what several keys say together:

    sections:
      Algorithm:
        to:                                       # one key -> one of ours
          ppo_epochs: algorithm.ppo_epochs whole
        reads:                                    # functions read these keys; the text after them is for the page
          gamma lambd:
          loss_agg_mode: seq-mean-token-mean when left out.
        fixed:                                    # why the numbers are the same whatever a key says: the keys
          how data are read: (actor_train reference).data_args.(tag id) **.template
        lacks:                                    # what is not supported: the keys, or [keys, values that switch it off]
          computing in 8 bits: [critic.fp8, false]
        slower:                                   # as lacks, where the numbers of the run are the same without it
          an optimizer on the host: [optimizer_cpu_offload, false, 0]

What a function reads is recorded (source.py), and the translator finds out which of our keys it changes, so `reads` only
names the keys: one that is neither there nor in another row is unknown. Keys stand in one text; `(a b).(c d)` is each of
them with each, also within each other, and `$name` a list of the file's section `lists`. A section that is a text, as
`Data: verl`, is that of the file of this name, with the lists of both; rows that this file has itself take the place of that
file's.

`below: {trainer.trainer_config: [verl, Model, Engines]}` takes the rows of these sections of another file that are fixed,
lacking or slower, for that system's keys below a key of this one; the file's own rows come first. An empty section, or one
that refers to the section of the same name elsewhere, sets nothing and needs no row.

In a key `*` stands for one of its parts and `**` for any number of them, where the system knows the key (known/): another
one is unknown, as it is without the row. With `!` at its end a pattern takes any key. A row of the key itself comes before
a pattern; of patterns the one that is more exact in the first part in which they differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal

import yaml

from fivefold_dialects.known import NONE, KnownKeys, sections
from fivefold_dialects.source import Source, flatten

Convert = Callable[[Source, str], Any]
"""The source and a key -> our value, or None to leave ours as it is."""
Derived = Callable[[Source], Mapping[str, Any]]
"""The source -> our keys and values; None leaves ours as it is."""


@dataclass(frozen=True)
class Row:
    """One key of a system, and its meaning here."""

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
    """A row with a wildcard takes every key that it fits, known or not, because there is no list of those names."""

    @property
    def is_pattern(self) -> bool:
        return "*" in self.key


@dataclass(frozen=True)
class Section:
    """Rows under a heading of the documentation, in the order in which that system's users think."""

    title: str
    """Empty where another system's page has the rows."""
    rows: tuple[Row, ...]
    text: str = ""


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
    """The command that starts a run of its users here."""
    loses: tuple[str, ...] = ()
    """Features of the system that are missing here."""
    gains: tuple[str, ...] = ()
    page_of: Table | None = None
    """The table of the system whose page has the rows that are the same here."""

    @cached_property
    def exact(self) -> dict[str, Row]:
        return {row.key: row for section in self.sections for row in section.rows if not row.is_pattern}

    @cached_property
    def patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        found = [row for section in self.sections for row in section.rows if row.is_pattern]
        found.sort(key=_exactness)
        return [(_pattern(row.key), row) for row in found]

    def row(self, key: str) -> Row | None:
        """The row of a key: its own, or the first with a wildcard that fits and takes it."""
        if key in self.exact:
            return self.exact[key]
        return next((row for pattern, row in self.patterns if pattern.fullmatch(key) and self._takes(row, key)), None)

    def is_section(self, key: str) -> bool:
        """Whether keys of the system stand below this one."""
        return key in self._places or key in self.known.sections or self.row(f"{key}.x") is not None

    def _takes(self, row: Row, key: str) -> bool:
        """Whether the system knows the key; a row that has the last name itself takes it in every section of the system."""
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


def _exactness(row: Row) -> list[int]:
    """Return how much each part of a pattern leaves open, so that the one with the first named part comes first."""
    return [3 if part == "**" else 2 if part == "*" else int("*" in part) for part in row.key.split(".")]


def _pattern(key: str) -> re.Pattern[str]:
    pieces = {"**": ".+", "*": "[^.]*"}
    return re.compile("".join(pieces.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", key)))


@dataclass(frozen=True)
class Choice:
    """A key whose value names a method, a loss or a mean, and what each name is here.

    In the file (`choices`, by the key):

        actor_train.pg_variant:
          what: loss                              # in the message for a name that is not listed
          default: vanilla
          names:
            vanilla: {surrogate: log_likelihood}
            cispo:                                # $KEY is that key's number, `$KEY flag` what Source.flag reads
              surrogate: cispo
              clip_low: $actor_train.cispo_epsilon_low
              needs: {a mask besides the bounds: [actor_train.cispo_use_unified_mask, false]}

    `needs` are rows of the form `lacks` that hold with this name alone; `takes` are the arguments that it has. A name may
    also be one value.
    """

    key: str
    what: str
    names: Mapping[str, Any]
    default: str | None = None
    arguments: str = ""
    """A section whose keys are the choice's arguments: `$KEY` is one of them, and a name refuses those it does not take."""
    lists: Mapping[str, str] = field(default_factory=dict)

    def name(self, source: Source) -> str | None:
        """Return the name that the source has; reports it where it is not listed, and returns None then."""
        name = source.text(self.key) or self.default
        if name in self.names:
            return name
        source.lacks(self.key, f"the {self.what} {name}: known here are {', '.join(self.names)}")
        return None

    def read(self, source: Source) -> Any:
        """Return what the source's choice is here: our keys and values, or one value; an unlisted name is {} or None."""
        name = self.name(source)
        if name is None:
            return {} if isinstance(next(iter(self.names.values())), Mapping) else None
        chosen = self.names[name]
        if not isinstance(chosen, Mapping):
            return chosen
        for reason, keys in chosen.get("needs", {}).items():
            for row in _lacking("lacks", reason, keys, self.lists):
                if source.value(row.key) not in row.off:
                    source.lacks(row.key, row.note)
        said = source.under(f"{self.arguments}." if self.arguments else "")
        taken = set(several(chosen.get("takes", ""), self.lists))
        for key in said.keys("") if self.arguments else ():
            if key not in taken and said.value(key) is not None and said.value(key) is not False:
                said.lacks(key, f"an argument of the {self.what} {name}")
        return {ours: _number(said, value) for ours, value in chosen.items() if ours not in ("needs", "takes")}


def _number(source: Source, value: Any) -> Any:
    """A value of a choice; `$key` is that key's number, `$key reader` what this method of Source reads."""
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    key, _, reader = value[1:].partition(" ")
    return getattr(source, reader or "number")(key)


@cache
def load(name: str) -> Mapping[str, Any]:
    """Return the mapping in `tables/NAME.yaml`; `legacy/NAME` is the file of older releases."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    place = name if "/" in name else f"tables/{name}"
    content: dict[str, Any] = yaml.load(files(__package__).joinpath(f"{place}.yaml").read_text(), loader)  # noqa: S506
    return content


def listed(name: str, of: str) -> frozenset[str]:
    """Return the names in a list of `tables/NAME.yaml`."""
    lists = load(name)["lists"]
    return frozenset(several(lists[of], lists))


def choices(name: str) -> dict[str, Choice]:
    """Return the choices of `tables/NAME.yaml` by their key."""
    found, content = {}, load(name)
    for key, said in content["choices"].items():
        names = {each: chosen for listed, chosen in said["names"].items() for each in several(listed)}
        found[key] = Choice(key, lists=content.get("lists", {}), **{**said, "names": names})
    return found


def table(
    name: str | Mapping[str, Any],
    derived: Sequence[Derived] = (),
    converters: Mapping[str, Convert] = {},
    older: Mapping[str, Any] = {},
    **fields: Any,
) -> Table:
    """Make the table of `tables/NAME.yaml`, or of what such a file holds, with the system's functions.

    `converters` are those that rows `to` name besides the methods of Source; `older` has the versions and sections of keys
    of before 2026 (`legacy/`); `fields` are further ones of Table.
    """
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
    """Return full key -> value of nested defaults, whose keys may stand for several."""
    return {key: value for keys, value in flatten(tree) for key in several(keys)}


def several(text: str, lists: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the keys that a text stands for: `(a b).(c d)` is a.c, a.d, b.c and b.d."""
    if lists:
        text = re.sub(r"\$(\w+)", lambda name: " ".join(several(lists[name[1]], lists)), text)
    yield from _expanded(iter(re.findall(r"[()]|\s+|[^\s()]+", text)))


def _expanded(tokens: Iterator[str]) -> list[str]:
    """Return the keys of a text up to its end, or to the parenthesis that closes it."""
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
    """Yield the sections of a file, its own and those of others; of several rows of a key in those the first counts."""
    own: set[str] = set()
    named = {each: load(each) for each in content["sections"].values() if isinstance(each, str)}
    lists = dict(item for each in (*named.values(), content) for item in each.get("lists", {}).items())
    # Its own rows come first, for those of others give way to them.
    for title, each in sorted(content["sections"].items(), key=lambda item: isinstance(item[1], str)):
        section = _section(title, named[each]["sections"][title] if isinstance(each, str) else each, lists, converters)
        if isinstance(each, str):
            rows = {row.key: row for row in reversed(section.rows) if row.key not in own}
            section = replace(section, rows=tuple(rows.values())[::-1])
        else:
            own.update(row.key for row in section.rows)
        yield section


def _below(content: Mapping[str, Any], own: Table) -> Iterator[Section]:
    """Yield what another system's file says is fixed or not supported, for its keys below one of this system's."""
    for start, (name, *titles) in content.get("below", {}).items():
        other = load(name)
        for title in titles:
            forms = {form: rows for form, rows in other["sections"][title].items() if form in ("fixed", "lacks", "slower")}
            rows = (replace(row, key=f"{start}.{row.key}") for row in _section(title, forms, other["lists"], {}).rows)
            yield Section("", tuple(row for row in rows if row.is_pattern or own.row(row.key) is None))


def _section(title: str, rows: Mapping[str, Any], lists: Mapping[str, str], converters: Mapping[str, Convert]) -> Section:
    found: list[Row] = []
    for key, said in (rows.get("to") or {}).items():
        text, note = said if isinstance(said, list) else (said, "")
        ours, _, name = text.partition(" ")
        convert = converters[name] if name in converters else getattr(Source, name or "value")
        found += [Row(each, "to", (ours,), note, convert) for each in several(key, lists)]
    for keys, note in (rows.get("reads") or {}).items():
        found += [_row(key, "used", note=note or "") for key in several(keys, lists)]
    for reason, keys in (rows.get("fixed") or {}).items():
        found += [_row(key, "fixed", note=reason) for key in several(keys, lists)]
    for form in ("lacks", "slower"):
        for reason, keys in (rows.get(form) or {}).items():
            found += _lacking(form, reason, keys, lists)
    return Section(title, tuple(found), rows.get("text", ""))


def _lacking(form: str, reason: str, keys: str | list[Any], lists: Mapping[str, str]) -> list[Row]:
    text, *off = keys if isinstance(keys, list) else [keys]
    return [
        _row(key, "lacks", note=reason, off=(None, *off), changes_result=form == "lacks") for key in several(text, lists)
    ]


def _row(key: str, form: Literal["used", "fixed", "lacks"], **fields: Any) -> Row:
    return Row(key.removesuffix("!"), form, takes_any=key.endswith("!"), **fields)
