"""Translate a system's settings to our configuration by its table, and report how every key was handled."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from fivefold.config.dialect import Line, Outcome, Translation, Tree
from fivefold.config.loader import ConfigError, override
from fivefold.config.schema import Sections
from fivefold_dialects import clusters, trainers
from fivefold_dialects.bounds import LONGEST_KEY, TooMuchError
from fivefold_dialects.source import NULL, Source, UnreadableError, flatten
from fivefold_dialects.table import Derived, Row, Table

_MOST_SUGGESTIONS = 50
"""Most unknown keys for which a similar known key is searched; each search takes about 10 ms."""
_MOST_RERUNS = 300
"""Most keys of a function for which it is run again without the key; with more, each key is a source of all its values."""
AFTER = "after --"
"""Name of the source of our own settings in another system's command."""


def translate(
    table: Table, settings: Mapping[str, Any], defaults: Mapping[str, Any], environment: Mapping[str, str]
) -> Translation:
    """Return the translation of settings by full key; `environment` has values for the variables in them.
    Every key of the source has one outcome. A value that cannot be read is a fault, it is never guessed."""
    source = Source(settings, defaults, environment)
    rows = {key: table.row(key) for key in settings}
    values: dict[str, Line] = {}
    heard: dict[str, bool] = {}
    faults: list[str] = []

    def take(function: Derived, inferred: bool = True) -> None:
        seen = source.recording()
        try:
            result = _given(function(seen))
        except UnreadableError as error:
            faults.append(str(error))
            heard.update({key: False for key in seen.read if key not in heard})
            result = {}
        source.read.update(seen.read)
        if not result:
            return
        keys = [key for key in settings if key in seen.read]
        heard.update(dict.fromkeys(keys, True))
        unsure = [key for key in keys if inferred and _is_inferred(rows[key])]
        is_rerun = len(unsure) <= _MOST_RERUNS
        changed = {key: _changes(function, seen, key, result) if is_rerun else set(result) for key in unsure}
        for ours, value in result.items():
            values[ours] = Line(ours, value, tuple(key for key in keys if _concerns(rows[key], ours, changed.get(key))))

    for key, row in table.exact.items():
        if row.form == "to" and (key in settings or key in table.defaults):
            take(partial(_converted, row), inferred=False)
    for function in table.derived:
        take(function)
    values = trainers.on_megatron(values, source)
    suggests = iter(range(_MOST_SUGGESTIONS))
    outcomes = {key: _outcome(table, source, key, rows[key], values, heard, suggests) for key in settings}
    for outcome in source.outcomes:
        outcomes[outcome.key] = outcome
    chosen = {ours: line.value for ours, line in values.items()}
    launch = list(clusters.hosts(source, table.name, chosen))
    if on_ray := clusters.keys_for_ray(source, table.name, chosen):
        if "reward.judge.backend" in values:
            source.note(clusters.WITH_JUDGE)
        else:
            launch.append(Line(clusters.KEY, "ray", tuple(on_ray)))
    # An outcome that a function has reported is kept.
    reported = {outcome.key for outcome in source.outcomes}
    for line in launch:
        outcomes |= {key: _also(outcomes[key], line.key) for key in line.sources if key not in reported}
    lines = sorted([*values.values(), *launch], key=_order)
    names = {key: ", ".join(outcome.ours) or outcome.reason for key, outcome in outcomes.items()}
    faults = list(dict.fromkeys(faults))
    return Translation(nested(lines), [], names, lines, list(outcomes.values()), faults, notes=source.notes)


def _converted(row: Row, source: Source) -> dict[str, Any]:
    assert row.convert is not None
    return {row.ours[0]: row.convert(source, row.key)}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ours that a function gives, with an explicit null as None."""
    return {ours: None if value is NULL else value for ours, value in values.items() if value is not None}


def _is_inferred(row: Row | None) -> bool:
    return row is not None and row.form == "used" and not row.ours


def _changes(function: Derived, source: Source, key: str, result: Mapping[str, Any]) -> set[str]:
    """Return our keys whose values would change without the source key `key`, or with another value if the function needs
    it; all of them if it accepts no other value."""
    for other in source.others(key):
        with suppress(UnreadableError):
            changed = _given(function(other))
            return {ours for ours, value in result.items() if ours not in changed or changed[ours] != value}
    return set(result)


def settings_of(tree: Tree, overrides: list[str]) -> dict[str, Any]:
    """Return full key -> value of a tree and `key=value` words, including Hydra's signs (`+key`, `++key`, `~key`)."""
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


def _concerns(row: Row | None, ours: str, changed: set[str] | None) -> bool:
    """Return whether a key that a function read is a source of the function's value `ours`."""
    if changed is not None:
        return ours in changed
    return row is not None and any(ours == name or ours.startswith(f"{name}.") for name in row.ours)


def _outcome(
    table: Table,
    source: Source,
    key: str,
    row: Row | None,
    values: Mapping[str, Line],
    heard: Mapping[str, bool],
    suggests: Iterator[int],
) -> Outcome:
    value = source.settings[key]
    if row is None and table.is_section(key) and _sets_nothing(source, key):
        return Outcome(key, value, "fixed", "empty, or a copy of another model's section")
    if row is None:
        return Outcome(key, value, "unknown", _unknown(table, key, next(suggests, None) is not None))
    if row.form == "fixed":
        return Outcome(key, value, "fixed", row.note)
    if row.form == "lacks":
        if row.is_off(_read(source, key)):
            return Outcome(key, value, "fixed", f"off, as here: {row.note}")
        return Outcome(key, value, "unsupported", row.note, changes_result=row.changes_result)
    ours = tuple(name for name, line in values.items() if key in line.sources)
    if ours or (heard.get(key) and _is_inferred(row)):
        return Outcome(key, value, "translated", row.note, ours)
    if heard.get(key) is False:
        return Outcome(key, value, "fixed", "what it decides is refused")
    is_default = key in source.read
    reason = "no effect: this is already the default behavior" if is_default else "it has no effect with these settings"
    return Outcome(key, value, "fixed", reason)


def _sets_nothing(source: Source, key: str) -> bool:
    """Return whether a section is empty, or refers to a section of the same name elsewhere."""
    text, name = str(source.settings[key]), key.rpartition(".")[2]
    return _read(source, key) in (None, [], {}, "") or (text.startswith("${") and f".{name}" in text)


def _read(source: Source, key: str) -> Any:
    """Return the value of a key, or its text as it was written if it cannot be read."""
    try:
        return source.value(key)
    except UnreadableError:
        return source.settings[key]


def _also(outcome: Outcome, ours: str) -> Outcome:
    """Return the outcome of a key whose value is also a source of `ours`."""
    if outcome.is_refused:
        return outcome
    return dataclasses.replace(outcome, kind="translated", ours=(*outcome.ours, ours), reason="")


def with_own(translation: Translation, settings: Sequence[str]) -> Translation:
    """Return the translation with our own `key=value` settings, which override the translated ones."""
    added = {key: Line(key, value, (AFTER,)) for key, value in _leaves(override({}, list(settings)))}
    kept = [line for line in translation.lines if not any(f"{line.key}.".startswith(f"{key}.") for key in added)]
    if unknown := [key for key in added if key.partition(".")[0] not in known_keys()]:
        raise ConfigError([f"settings after -- must be keys of fivefold: got {unknown[0]}"])
    lines = sorted([*kept, *added.values()], key=_order)
    return dataclasses.replace(translation, lines=lines, tree=nested(lines))


def _leaves(tree: Tree, start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield full keys and values of settings of ours; a mapping with a dot in a name (`file.py:function`) is a value."""
    for name, value in tree.items():
        key = f"{start}{name}"
        if isinstance(value, dict) and value and not any("." in str(inner) for inner in value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _unknown(table: Table, key: str, suggests: bool) -> str:
    if key in known_keys():
        return f"a key of fivefold, not of {table.name}: write it after --, as in -- {key}=..."
    near = _near(table, key) if suggests else None
    return f"not a known key of {table.name}" + (f": did you mean {near}?" if near else "")


def _near(table: Table, key: str) -> str | None:
    """Return the known key that is most similar to a misspelt one; None if none is similar."""
    known = [*table.exact, *table.defaults, *sorted(_filled(name, key) for name in table.known.names)]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not close:
        last = key.rpartition(".")[2]
        close = [name for name in known if name.rpartition(".")[2] == last][:1]
    return close[0] if close else None


def _filled(name: str, key: str) -> str:
    """Return a name with each `*` replaced by the part of `key` at this place."""
    parts = key.split(".")
    pieces = enumerate(name.split("."))
    return ".".join(parts[place] if piece == "*" and place < len(parts) else piece for place, piece in pieces)


@cache
def our_defaults() -> dict[str, Any]:
    """Return our keys with their defaults, in the order of the schema; a section or a key without default has MISSING."""

    def below(kind: type[Any], start: str) -> Iterator[tuple[str, Any]]:
        hints = typing.get_type_hints(kind)
        for field in sorted(dataclasses.fields(kind), key=lambda field: field.name not in ("algorithm", "name")):
            key, hint = f"{start}{field.name}", hints[field.name]
            inner = [option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option)]
            if inner:
                yield key, dataclasses.MISSING
                yield from below(typing.cast(type[Any], inner[0]), f"{key}.")
            elif field.default_factory is not dataclasses.MISSING:
                yield key, field.default_factory()
            else:
                yield key, field.default

    return dict(below(Sections, ""))


@cache
def known_keys() -> dict[str, int]:
    """Return our keys with their places in a file: the method comes first, and its name before its choices."""
    return {key: place for place, key in enumerate(our_defaults())}


def _order(line: Line) -> tuple[int, str]:
    """Return the place of the line's key in a file, or of the mapping that the key is in."""
    key = line.key
    while key not in known_keys():
        key = key.rpartition(".")[0]
    return known_keys()[key], line.key


def nested(lines: Iterable[Line]) -> Tree:
    """Return the nested mapping that lines with full keys make."""
    tree: Tree = {}
    for line in lines:
        *parents, last = line.key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = line.value
    return tree
