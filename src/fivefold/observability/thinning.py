"""Curves of many steps -> fewer points: first, last, least and greatest of each stretch, so that spikes stay visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
_POINTS = 4
"""Largest number of points of a metric in a stretch."""


def thin(rows: Sequence[Row], most_values: int) -> tuple[list[Row], list[Row]]:
    """Return (rows with about `most_values` values, seconds of each stage within each stretch), both with their `step`.

    If there are no more values than that, return all rows and an empty list. A row keeps only its time `wall`, and the
    values that are drawn for its metrics, to six digits.
    """
    names = sorted({name for row in rows for name in row} - {"step", "wall"})
    if sum(map(len, rows)) <= most_values:
        return list(rows), []
    size = -(-len(rows) // max(1, most_values // (_POINTS * max(1, len(names)))))
    values_of_rows: list[Row] = [{} for _ in rows]
    seconds = []
    for begin in range(0, len(rows), size):
        stretch = range(begin, min(begin + size, len(rows)))
        for name in names:
            places = [place for place in stretch if rows[place].get(name) is not None]
            if not places:
                continue
            least = min(places, key=lambda place: rows[place][name])
            most = max(places, key=lambda place: rows[place][name])
            for place in (places[0], least, most, places[-1]):
                values_of_rows[place][name] = _rounded(rows[place][name])
        stages = {name: [rows[place].get(name) or 0 for place in stretch] for name in names if name.startswith("time/")}
        seconds.append(
            {**_moment(rows[begin]), **{name: _rounded(sum(spent)) for name, spent in stages.items() if any(spent)}}
        )
    return [{**_moment(row), **values} for row, values in zip(rows, values_of_rows, strict=True) if values], seconds


def _moment(row: Row) -> Row:
    """Return the row's step and time, with which its values are drawn."""
    return {"step": row["step"], **({"wall": round(row["wall"], 1)} if row.get("wall") is not None else {})}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")
