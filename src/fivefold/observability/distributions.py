"""Logged samples -> histograms of rewards and of lengths, over stretches of a run's steps. No torch here."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import ceil, floor, log10, nan
from typing import Any

from fivefold.observability.growing import is_number

_MOST_STRETCHES = 20
_MOST_BINS = 24
KINDS = ("reward", "length")


class Drawn:
    """Rewards and lengths of the training samples of a run, as its rows of samples.jsonl give them."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.numbers = {kind: array("d") for kind in KINDS}

    def add(self, row: dict[str, Any]) -> None:
        """Add the numbers of a row: of its whole group if it has them, else of its sample."""
        if row.get("kind") == "val":
            return
        rewards, lengths = row.get("group_rewards"), row.get("group_lengths")
        if not (isinstance(rewards, list) and isinstance(lengths, list) and len(rewards) == len(lengths)):
            if "sample" in row and row["sample"] != 0:
                # The row of the group's first sample has the numbers of this one.
                return
            rewards, lengths = [row.get("reward")], [row.get("response_tokens")]
        self.steps.extend([row["step"]] * len(rewards))
        for kind, values in zip(KINDS, (rewards, lengths), strict=True):
            self.numbers[kind].extend(float(value) if is_number(value) else nan for value in values)


def histograms(runs: Sequence[Drawn]) -> dict[str, Any]:
    """Return for `reward` and `length` the bins and, for each run, the counts of its stretches of steps.

    All runs have the same bins, about 24 at most. A bin is (from, to); few distinct values have a bin each, with from = to.
    """
    return _histograms(tuple((run, len(run.steps)) for run in runs))


@lru_cache(maxsize=8)
def _histograms(runs: tuple[tuple[Drawn, int], ...]) -> dict[str, Any]:
    """Return the histograms of runs that have so many numbers: a live page requests them more often than they change."""
    return {kind: histogram for kind in KINDS if (histogram := _histogram([run for run, _ in runs], kind)) is not None}


def _histogram(runs: Sequence[Drawn], kind: str) -> dict[str, Any] | None:
    distinct = sorted(value for value in set[float]().union(*(run.numbers[kind] for run in runs)) if value == value)
    if not distinct:
        return None
    starts, bins = _bins(distinct)
    return {"bins": bins, "runs": [_counts(run, kind, starts) for run in runs]}


def _bins(distinct: Sequence[float]) -> tuple[list[float], list[tuple[float, float]]]:
    """Return (start of each bin, bins) for sorted distinct values."""
    is_whole = all(value == int(value) for value in distinct)
    if len(distinct) <= (_MOST_BINS // 2 if is_whole else _MOST_BINS):
        return list(distinct), [(value, value) for value in distinct]
    low, high = distinct[0], distinct[-1]
    # A round width, as 1, 2 or 5, so that the bins begin at round numbers.
    raw = (high - low) / _MOST_BINS
    size = 10.0 ** floor(log10(raw))
    width = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    width = max(1.0, width) if is_whole else width
    places = range(floor(low / width), floor(high / width) + 1)
    starts = [float(f"{place * width:.12g}") for place in places]
    return starts, [(start, start + width - 1 if is_whole else float(f"{start + width:.12g}")) for start in starts]


def _counts(run: Drawn, kind: str, starts: Sequence[float]) -> list[dict[str, Any]]:
    """Return {from, to, counts} of each stretch; every stretch has about as many steps."""
    steps = sorted(set(run.steps))
    size = max(1, ceil(len(steps) / _MOST_STRETCHES))
    firsts = steps[::size]
    counts = [[0] * len(starts) for _ in firsts]
    drawn = [Counter[float]() for _ in firsts]
    end = 0
    for step, rows in groupby(run.steps):
        begin, end = end, end + sum(1 for _ in rows)
        drawn[bisect_right(firsts, step) - 1].update(run.numbers[kind][begin:end])
    for stretch, values in zip(counts, drawn, strict=True):
        for value, count in values.items():
            if value == value:
                # Rounding may put the least value before the first start.
                stretch[max(0, bisect_right(starts, value) - 1)] += count
    lasts = [steps[min(place + size, len(steps)) - 1] for place in range(0, len(steps), size)]
    return [
        {"from": first, "to": to, "counts": stretch_counts}
        for first, to, stretch_counts in zip(firsts, lasts, counts, strict=True)
    ]
