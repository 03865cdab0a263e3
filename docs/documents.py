"""Writes documents.md from documents.yaml: what pages of other systems describe, what does it here, and what shows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TESTS, RESULTS = "tests/", "benchmarks/results/"
WORKS, IN_PART, REFUSED = "works", "in part", "refused"
HEAD = """\
# What other systems' pages describe

{generated}

Five pages describe training on Megatron: those of siiRL, Trinity-RFT, ROLL and AReaL, and SkyRL's pull request 223. Each
of the {total} things that they describe is a row: **{works} work, {part} work in part, {refused} are refused.**

*works*: a test or a measurement shows it. *in part*: what is not shown, or has no effect yet, follows. *refused*: a run
that needs it does not start, and the reason follows. `make test-documents` runs the pages' own commands and files in
small, where their text is there, and changes each of their settings once. The rows are in `docs/documents.yaml`; a test
compares them with the tests and results that they name.
"""


@dataclass(frozen=True)
class Row:
    id: str
    says: str
    here: str
    evidence: list[str | dict[str, str]]
    """Tests, as FILE::NAME below tests/, and results: file of benchmarks/results -> words that it has."""
    unproven: str = ""
    refused: str = ""

    @property
    def mark(self) -> str:
        return REFUSED if self.refused else IN_PART if self.unproven else WORKS

    @property
    def tests(self) -> list[str]:
        """Tests that are named, from the repository's root."""
        return [TESTS + name for name in self.evidence if isinstance(name, str)]

    @property
    def results(self) -> list[tuple[str, str]]:
        """(file, words that it has), from the repository's root."""
        return [
            (RESULTS + name, words)
            for results in self.evidence
            if isinstance(results, dict)
            for name, words in results.items()
        ]


@cache
def documents() -> dict[str, tuple[str, list[Row]]]:
    """System -> title of its page and the rows of its table."""
    tree: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docs/documents.yaml").read_text())
    return {
        system: (page["title"], [Row(id, **row) for id, row in page.items() if id != "title"])
        for system, page in tree.items()
    }


def write(generated: str) -> str:
    """Return the page; `generated` is the line that says so."""
    rows = [row for _, page in documents().values() for row in page]
    marks = Counter(row.mark for row in rows)
    head = HEAD.format(generated=generated, total=len(rows), works=marks[WORKS], part=marks[IN_PART], refused=marks[REFUSED])
    return head + "".join(_table(title, page) for title, page in documents().values())


def _table(title: str, rows: list[Row]) -> str:
    marks = Counter(row.mark for row in rows)
    counts = ", ".join(f"{marks[mark]} {mark}" for mark in (WORKS, IN_PART, REFUSED) if marks[mark])
    lines = [
        f"\n## {title}\n\n{len(rows)} rows: {counts}.\n",
        "| | the page has | here | mark | evidence |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        mark = f"{row.mark}: {row.unproven}{row.refused}" if row.unproven or row.refused else row.mark
        shown = [f"`{test}`" for test in row.tests] + [f"[{file}](../{file}): `{words}`" for file, words in row.results]
        cells = (row.id, row.says, row.here, mark, "<br>".join(shown))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
