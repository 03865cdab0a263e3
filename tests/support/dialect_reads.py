"""What a dialect's functions read in a run: the keys that they ask a source for, and the sections that they go through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fivefold.config.dialect import find_dialect
from fivefold.config.loader import read_mapping
from fivefold_dialects import translator
from fivefold_dialects.source import Source
from fivefold_dialects.table import Row, Table, _pattern
from tests.support.dialects import HOME


@dataclass
class Reads:
    """What the functions of one table read, over several runs."""

    table: Table
    keys: set[str] = field(default_factory=set)
    starts: set[str] = field(default_factory=set)
    """Beginnings of the keys that they go through."""

    def has(self, row: Row) -> bool:
        if not row.is_pattern:
            return row.key in self.keys or any(row.key.startswith(start) for start in self.starts if start.endswith("."))
        pattern = _pattern(row.key)
        fixed = row.key.partition("*")[0]
        return any(pattern.fullmatch(key) for key in self.keys) or any(
            fixed.startswith(start) for start in self.starts if start
        )


def reads_of(system: str, runs: Iterable[tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch) -> list[Reads]:
    """What is read of (words, YAML) by each table of a system; a run that is refused counts as far as it is read."""
    reads_by_table: dict[int, Reads] = {}
    opened: list[Source] = []
    starts: set[str] = set()
    plain = translator.translate

    class Listening(Source):
        def recording(self) -> Source:
            opened.append(super().recording())
            return opened[-1]

        def keys(self, start: str) -> list[str]:
            starts.add(self.prefix + start)
            return super().keys(start)

    def opening(*arguments: Any) -> Source:
        opened.append(Listening(*arguments))
        return opened[-1]

    def translate(table: Table, *arguments: Any) -> Any:
        opened.clear()
        starts.clear()
        result = plain(table, *arguments)
        reads = reads_by_table.setdefault(id(table.sections), Reads(table))
        reads.keys.update(*(source.read for source in opened))
        reads.starts.update(starts)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(translator, "Source", opening)
        patched.setattr(translator, "translate", translate)
        for words, tree in runs:
            find_dialect(system)(read_mapping(tree, "a file"), words, environment=HOME)  # type: ignore[call-arg]
    return list(reads_by_table.values())


def unread(reads: list[Reads]) -> dict[str, list[str]]:
    """Rows of each table that say that a key is used, and that no function reads in any of the runs."""
    unread_rows: dict[str, list[str]] = defaultdict(list)
    for table_reads in reads:
        rows = (row for section in table_reads.table.sections for row in section.rows)
        unread_rows[table_reads.table.name] += [row.key for row in rows if row.form == "used" and not table_reads.has(row)]
    return {name: rows for name, rows in unread_rows.items() if rows}
