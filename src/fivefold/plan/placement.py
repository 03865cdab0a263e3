"""Table of what each rank holds: models and engines with their layouts -> text. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fivefold.layout import ParallelLayout

_ROWS = 16
"""Largest number of rows in the table; with more ranks, several share one row."""
_SHOWN = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep", "et": "etp"}


@dataclass(frozen=True)
class Placed:
    """A model or engine that its layout places on consecutive ranks."""

    name: str
    layout: ParallelLayout
    first_rank: int = 0

    @property
    def end(self) -> int:
        return self.first_rank + self.layout.world_size

    def describe(self) -> str:
        """`reference megatron:d4t1p1 on ranks 0-3`."""
        return f"{self.name} {self.layout} on {'rank' if self.end == self.first_rank + 1 else 'ranks'} {self.ranks}"

    @property
    def ranks(self) -> str:
        return _range(list(range(self.first_rank, self.end)))

    def cell(self, ranks: Sequence[int]) -> str:
        """Return its coordinates on these ranks, for the dimensions above 1: `d0-1 t0 p1`."""
        held = [self.layout.coordinates(rank - self.first_rank) for rank in ranks if self.first_rank <= rank < self.end]
        if not held:
            return "-"
        parts = [
            letter + _range(sorted({getattr(place, size) for place in held}))
            for letter, size in _SHOWN.items()
            if getattr(self.layout, size) > 1
        ]
        return " ".join(parts) or "whole"


def placement(everything: Sequence[Placed]) -> list[str]:
    """Return a table of what each rank holds.

    Models with the same placement share a column, and equal consecutive rows are merged.

    Example: a policy `d2t2` and a reference `d4`:

        rank  policy  reference
        0     d0 t0   d0
        1     d0 t1   d1
        2     d1 t0   d2
        3     d1 t1   d3
    """
    columns: list[list[Placed]] = []
    for one in everything:
        alike = [column for column in columns if _lie_alike(column[0], one)]
        alike[0].append(one) if alike else columns.append([one])
    world = max(one.end for one in everything)
    edges = sorted({0, world, *(rank for one in everything for rank in (one.first_rank, one.end))})
    size = 1
    while sum(-(-(end - begin) // size) for begin, end in pairwise(edges)) > _ROWS and size < world:
        size *= 2
    rows: list[tuple[list[int], list[str]]] = []
    for begin, end in pairwise(edges):
        for first in range(begin, end, size):
            ranks = list(range(first, min(first + size, end)))
            cells = [column[0].cell(ranks) for column in columns]
            if rows and rows[-1][1] == cells:
                rows[-1][0].extend(ranks)
            else:
                rows.append((ranks, cells))
    table = [["rank", *(", ".join(one.name for one in column) for column in columns)]]
    table += [[_range(ranks), *cells] for ranks, cells in rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _lie_alike(one: Placed, other: Placed) -> bool:
    return one.first_rank == other.first_rank and one.layout.is_same(other.layout)


def _range(numbers: list[int]) -> str:
    """Return `0-3` for 0, 1, 2, 3, and `0,2` for 0 and 2."""
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
