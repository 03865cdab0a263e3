"""Write docs/coming-from/SYSTEM.md from a system's tables; `make docs` runs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fivefold_dialects.system import System
from fivefold_dialects.table import Row, Section, Table


def write_page(dialect: System, note: str) -> str:
    """Return the page of a system as Markdown, with `note` below its title."""
    system, tables = dialect.name, dialect.tables
    table = tables[0]
    parts = [f"# Coming from {table.name}\n\n{note}\n", _head(system, table)]
    if (other := table.page_of) is not None:
        differing = {key: value for key, value in table.defaults.items() if other.defaults.get(key) != value}
        page = f"[{other.name}'s page]({other.name.lower()}.md)"
        parts.append(f"The keys are the same as on {page}, except for the rows below and these defaults:\n")
        parts.append(", ".join(f"`{key}` {_value(value)}" for key, value in differing.items()) + ".\n")
    parts += [text for source in tables for part in source.sections if (text := _section(part, source))]
    return "\n".join(parts)


def _head(system: str, table: Table) -> str:
    return f"""{table.command}

`fivefold convert --from {system} ...` writes this run as a commented `run.yaml`. Pass variables that a script does not set
with `--env NAME=value`, and our own settings after `--`, as in `-- trainer.steps=10`. A run on several machines gets
`launch.backend: ray`, unless torchrun has started this process. A setting that is left out has {table.name}'s default,
not ours{_versions(system, table)}. Each key is handled in one of five ways:

- **our key**: it becomes this key; the note names a conversion of its value;
- *with others*: several keys together give values of ours, and `convert` names these keys next to each value;
- *fixed here*: the numbers of the run are the same with any value;
- **not supported**: the run is refused, unless the value turns the feature off;
- *not supported, speed only*: the run starts and reports the key.

What is missing here: {"; ".join(table.loses)}.

What you gain: {"; ".join(table.gains)}.
"""


def _versions(system: str, table: Table) -> str:
    return "".join(f"; `--from {system}@{version}` has the defaults of {version}" for version in table.versions)


def _section(section: Section, table: Table) -> str:
    """Return a section as Markdown, without the rows that the page of `table.page_of` has; empty if no row is left."""
    elsewhere: set[str] = set()
    if (other := table.page_of) is not None:
        elsewhere = {row for section in other.sections for row in _rows(section, other)}
    rows = [row for row in _rows(section, table) if row not in elsewhere]
    text = f"{section.text}\n\n" if section.text else ""
    head = f"| key of {table.name} | default | here | |\n|---|---|---|---|\n"
    return f"## {section.title}\n\n{text}{head}" + "\n".join(rows) + "\n" if rows and section.title else ""


def _rows(section: Section, table: Table) -> list[str]:
    return [_row(list(rows), table) for _, rows in itertools.groupby(section.rows, key=_same)]


def _same(row: Row) -> tuple[object, ...]:
    return row.form, row.ours, row.note, row.off, row.changes_result, row.convert


def _row(rows: list[Row], table: Table) -> str:
    first = rows[0]
    here = ", ".join(f"`{name}`" for name in first.ours)
    if not here:
        here = {"fixed": "*fixed here*", "used": "*with others*"}.get(first.form, "**not supported**")
        if first.form == "lacks" and not first.changes_result:
            here = "*not supported, speed only*"
    note = first.note
    if first.form == "lacks" and (off := [value for value in first.off if value is not None]):
        note += f" (off: {_values(off)})"
    defaults = [_value(table.defaults[row.key]) for row in rows if table.defaults.get(row.key) is not None]
    shown = ", ".join(dict.fromkeys(defaults)) if len(rows) == len(defaults) else ""
    cells = (" ".join(f"`{row.key}`" for row in rows), shown, here, note)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(values: Iterable[object]) -> str:
    return ", ".join(_value(value) for value in values)


def _value(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
