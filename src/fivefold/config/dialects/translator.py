"""A table and a system's settings -> our configuration, with what became of every key."""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from fivefold.config.dialects import Line, Outcome, Translation, Tree, clusters
from fivefold.config.dialects.bounds import LONGEST_KEY, TooMuchError
from fivefold.config.dialects.source import Source, UnreadableError, flatten
from fivefold.config.dialects.table import Row, Table
from fivefold.config.loader import ConfigError, override
from fivefold.config.ranges import OneOf
from fivefold.config.schema import RunConfig

_MOST_SUGGESTIONS = 50
"""Unknown keys for which a known one is looked for, which takes a hundredth of a second each."""
AFTER = "after --"
"""Where settings of ours stand in another system's command."""


class SystemDialect(Protocol):
    """A dialect that knows the system's versions and the variables that stand open."""

    def __call__(
        self, tree: Tree, overrides: list[str], environment: Mapping[str, str] | None = None, version: str = ""
    ) -> Translation: ...


def dialect(table: Table | Callable[[Mapping[str, Any]], Table]) -> SystemDialect:
    """The dialect of a table, or of the table that fits the settings."""

    def read(
        tree: Tree, overrides: list[str], environment: Mapping[str, str] | None = None, version: str = ""
    ) -> Translation:
        settings = settings_of(tree, overrides)
        chosen = table if isinstance(table, Table) else table(settings)
        if version and (fault := _version_fault(chosen, version)):
            raise ValueError(fault)
        release = version or chosen.release_of(settings)
        defaults = {**chosen.elsewhere, **chosen.defaults, **chosen.versions.get(release, {})}
        found = translate(chosen, settings, defaults, os.environ if environment is None else environment)
        return dataclasses.replace(found, release=release)

    return read


def _version_fault(table: Table, version: str) -> str | None:
    if not table.versions:
        return f"this program of {table.name} has no older defaults here: say --from {table.name.lower()} without @{version}"
    fault = OneOf(table.versions).fault(version)
    return fault and f"the version of {table.name} {fault}"


def translate(
    table: Table, settings: Mapping[str, Any], defaults: Mapping[str, Any], environment: Mapping[str, str]
) -> Translation:
    """Translate settings by their full key; `environment` has the variables that stand open.

    Every key of the source has one outcome; a value that cannot be read is a fault, never a guess.
    """
    source = Source(settings, defaults, environment)
    values: dict[str, tuple[Any, frozenset[str]]] = {}
    faults: list[str] = []
    outcomes: dict[str, Outcome] = {}

    def take(ours: str, value: Any, read: set[str]) -> None:
        if value is not None:
            values[ours] = (value, frozenset(read))

    for row in _rows(table, settings):
        if row.form == "to":
            seen = source.recording()
            try:
                assert row.convert is not None
                take(row.ours[0], row.convert(seen, row.key), seen.read)
            except UnreadableError as error:
                faults.append(str(error))
            source.read.update(seen.read)
    for function in table.derived:
        seen = source.recording()
        try:
            for ours, value in function(seen).items():
                take(ours, value, seen.read)
        except UnreadableError as error:
            faults.append(str(error))
        source.read.update(seen.read)
    suggests = iter(range(_MOST_SUGGESTIONS))
    for key, value in settings.items():
        outcomes[key] = _outcome(table, source, key, value, values, suggests)
    for each in source.found:
        outcomes[each.key] = each
    lines = [Line(ours, value, _sources(table, settings, ours, read)) for ours, (value, read) in values.items()]
    on_ray = clusters.keys_for_ray(source, table.name)
    if on_ray and "reward.judge.backend" in values:
        source.note(clusters.WITH_JUDGE)
    elif on_ray:
        lines.append(Line(clusters.KEY, "ray", tuple(on_ray)))
        # What a function said of a key stays.
        said = {each.key for each in source.found}
        outcomes |= {key: _also(outcomes[key], clusters.KEY) for key in on_ray if key not in said}
    lines.sort(key=_order)
    names = {key: ", ".join(each.ours) or each.reason for key, each in outcomes.items()}
    faults = list(dict.fromkeys(faults))
    return Translation(_nested(lines), [], names, lines, list(outcomes.values()), faults, notes=source.notes)


def settings_of(tree: Tree, overrides: list[str]) -> dict[str, Any]:
    """Full key -> value of tree and words; Hydra's signs (`+key`, `++key`, `~key`) are read."""
    settings = dict(flatten(tree))
    for word in overrides:
        key, _, value = word.partition("=")
        if key.startswith("~"):
            for below in [name for name in settings if name == key[1:] or name.startswith(f"{key[1:]}.")]:
                del settings[below]
        else:
            settings[key.lstrip("+")] = value
    if long := next((key for key in settings if len(key) > LONGEST_KEY), None):
        raise TooMuchError(f"a key has {len(long)} letters, more than {LONGEST_KEY}: {long[:LONGEST_KEY]}...")
    return settings


def _sources(table: Table, settings: Mapping[str, Any], ours: str, read: frozenset[str]) -> tuple[str, ...]:
    """Keys of the source that one of ours comes from: of those that were read, the ones whose row says so."""
    rows = {key: table.row(key) for key in settings if key in read}
    return tuple(key for key, row in rows.items() if row is not None and _concerns(row, ours))


def _concerns(row: Row, ours: str) -> bool:
    return any(ours == name or ours.startswith(f"{name}.") for name in row.ours)


def _rows(table: Table, settings: Mapping[str, Any]) -> list[Row]:
    """Rows whose keys are set or have a default."""
    return [row for key, row in table.exact.items() if key in settings or key in table.defaults]


def _outcome(
    table: Table,
    source: Source,
    key: str,
    value: Any,
    values: Mapping[str, tuple[Any, frozenset[str]]],
    suggests: Iterator[int],
) -> Outcome:
    row = table.row(key)
    if row is None:
        return Outcome(key, value, "unknown", _unknown(table, key, next(suggests, None) is not None))
    if row.form == "fixed":
        return Outcome(key, value, "fixed", row.note)
    if row.form == "lacks":
        try:
            found = source.value(key)
        except UnreadableError:
            found = value
        if found in row.off or found in ([], {}):
            return Outcome(key, value, "fixed", f"off, as here: {row.note}")
        return Outcome(key, value, "unsupported", row.note, changes_result=row.changes_result)
    ours = tuple(name for name, (_, read) in values.items() if key in read and _concerns(row, name))
    if ours:
        return Outcome(key, value, "translated", row.note, ours)
    if key in source.read:
        return Outcome(key, value, "fixed", f"it asks for nothing that is not so here anyway{row.note and ': '}{row.note}")
    return Outcome(key, value, "fixed", f"{table.name} does not read it with these settings{row.note and ': '}{row.note}")


def _also(outcome: Outcome, ours: str) -> Outcome:
    """The outcome of a key whose value goes into `ours` too."""
    if outcome.is_refused:
        return outcome
    return dataclasses.replace(outcome, kind="translated", ours=(*outcome.ours, ours), reason="")


def with_own(translation: Translation, settings: Sequence[str]) -> Translation:
    """The translation with `key=value` settings of ours over it."""
    own = {key: Line(key, value, (AFTER,)) for key, value in flatten(override({}, list(settings)))}
    kept = [line for line in translation.lines if not any(line.key == key or line.key.startswith(f"{key}.") for key in own)]
    if unknown := [key for key in own if key.partition(".")[0] not in known_keys()]:
        raise ConfigError([f"what follows -- must be keys of fivefold: got {unknown[0]}"])
    lines = sorted([*kept, *own.values()], key=_order)
    return dataclasses.replace(translation, lines=lines, tree=_nested(lines))


def _unknown(table: Table, key: str, suggests: bool) -> str:
    if key in known_keys():
        return f"a key of fivefold, not of {table.name}: it stands after --, as in -- {key}=..."
    near = _near(table, key) if suggests else None
    return f"no key of {table.name} that is known here" + (f": did you mean {near}?" if near else "")


def _near(table: Table, key: str) -> str | None:
    """The known key that a misspelt one is most like."""
    known = [*table.exact, *table.defaults, *sorted(_filled(name, key) for name in table.known.names)]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not close:
        last = key.rpartition(".")[2]
        close = [name for name in known if name.rpartition(".")[2] == last][:1]
    return close[0] if close else None


def _filled(name: str, key: str) -> str:
    """A name with the key's own parts in the place of `*`."""
    parts = key.split(".")
    pieces = enumerate(name.split("."))
    return ".".join(parts[place] if piece == "*" and place < len(parts) else piece for place, piece in pieces)


@cache
def known_keys() -> dict[str, int]:
    """Our keys, in the order of the schema."""

    def below(kind: type[Any], start: str) -> Iterator[str]:
        for name, hint in typing.get_type_hints(kind).items():
            inner = [option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option)]
            yield f"{start}{name}"
            if inner:
                yield from below(typing.cast(type[Any], inner[0]), f"{start}{name}.")

    return {key: place for place, key in enumerate(below(RunConfig, ""))}


def _order(line: Line) -> tuple[int, str]:
    """The key's place, or that of the mapping that it is in."""
    key = line.key
    while key not in known_keys():
        key = key.rpartition(".")[0]
    return known_keys()[key], line.key


def _nested(lines: list[Line]) -> Tree:
    tree: Tree = {}
    for line in lines:
        *parents, last = line.key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = line.value
    return tree
