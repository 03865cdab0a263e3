"""Balances work: lengths of samples -> replicas of an optimizer step, micro-batches of a replica. No torch here.

Both are number partitioning. Longest first to the least loaded (LPT, Graham 1969) is within 4/3 of the optimum. With many
items per part it is within a few percent of the mean.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence


def balance(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Returns the items of each of `parts` parts of nearly equal weight; some may be empty.

    Example: `balance([5, 4, 3, 3, 3], 2) == [[0, 3, 4], [1, 2]]`, or 11 and 7: the heaviest item first, each to the part
    that is lightest so far.
    """
    items_of_parts: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, part) for part in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, lightest = heap[0]
        items_of_parts[lightest].append(item)
        heapq.heapreplace(heap, (load + weights[item], lightest))
    return items_of_parts


def deal(work_U: Sequence[float], part_U: Sequence[int], replicas: int) -> list[int]:
    """Returns the replica of each unit (a sample, or samples that are compared), balanced separately for each part of the
    step.

    `work_U` is the cost of each unit. `part_U` is the part of each unit: units of one part are computed together in an
    optimizer step.
    """
    members: dict[int, list[int]] = {}
    for unit, part in enumerate(part_U):
        members.setdefault(part, []).append(unit)
    owner_U = [0] * len(work_U)
    for units in members.values():
        for replica, chosen in enumerate(balance([work_U[unit] for unit in units], replicas)):
            for place in chosen:
                owner_U[units[place]] = replica
    return owner_U


def deal_sharing(rows: Sequence[tuple[float, float, int, int]], replicas: int) -> list[int]:
    """Returns the replica of each sample, where samples of one prompt on one replica compute the prompt once.

    A row is (work of the sample, work of its prompt, number of its prompt, part of the step). For each part, groups are
    tried whole, halved, quartered and so on down to single samples. The split that gives the busiest replica the least work
    is used.
    """
    members: dict[int, dict[int, list[int]]] = {}
    for sample, (_, _, group, part) in enumerate(rows):
        members.setdefault(part, {}).setdefault(group, []).append(sample)
    owner_N = [0] * len(rows)
    for groups in members.values():
        best, largest = float("inf"), max(len(samples) for samples in groups.values())
        splits = sorted({min(2**k, largest) for k in range(largest.bit_length() + 1)}) if replicas > 1 else [1]
        for pieces in splits:
            units, work_U = _split_groups(rows, list(groups.values()), pieces)
            dealt = balance(work_U, replicas)
            busiest = max(sum(work_U[unit] for unit in chosen) for chosen in dealt)
            # A difference within rounding error must not change the choice.
            if busiest < best * (1 - 1e-9):
                best = busiest
                for replica, chosen in enumerate(dealt):
                    for unit in chosen:
                        for sample in units[unit]:
                            owner_N[sample] = replica
    return owner_N


def _split_groups(
    rows: Sequence[tuple[float, float, int, int]], groups: Sequence[list[int]], pieces: int
) -> tuple[list[list[int]], list[float]]:
    """Splits each group into `pieces` units of similar work; returns the units and the work of each, with the prompt counted
    once."""
    units = [
        [samples[place] for place in chosen]
        for samples in groups
        for chosen in balance([rows[sample][0] for sample in samples], min(pieces, len(samples)))
    ]
    return units, [sum(rows[n][0] for n in unit) - (len(unit) - 1) * rows[unit[0]][1] for unit in units]


def micro_batches_needed(lengths: Sequence[int], budget: int) -> int:
    """Returns the number of micro-batches of at most `budget` tokens that hold these samples, at least 1. A longer sample
    fills one alone."""
    fewest = max(1, -(-sum(lengths) // budget), sum(2 * length > budget for length in lengths))
    most = len(_best_fit(lengths, budget))
    # Balanced micro-batches are preferred, but balancing fails a little above the smallest possible number.
    for count in range(fewest, min(fewest + 3, most)):
        if _fits(lengths, balance(lengths, count), budget):
            return count
    return max(most, 1)


def plan_micro_batches(lengths: Sequence[int], count: int, budget: int) -> list[list[int]]:
    """Returns the samples of each of `count` micro-batches, balanced in tokens if that keeps within the budget; some may be
    empty.

    `count` is at least `micro_batches_needed`.
    """
    balanced = balance(lengths, count)
    if _fits(lengths, balanced, budget):
        return balanced
    filled = _best_fit(lengths, budget)
    assert len(filled) <= count, f"{len(filled)} micro-batches are needed, {count} are allowed"
    return filled + [[] for _ in range(count - len(filled))]


def _fits(lengths: Sequence[int], plan: list[list[int]], budget: int) -> bool:
    return all(len(items) < 2 or sum(lengths[i] for i in items) <= budget for items in plan)


def _best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Packs by best fit decreasing: each item, longest first, goes to the fullest bin that still holds it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[item], -1))
        if place == len(room):
            bins.append([item])
            left, number = budget - lengths[item], len(bins) - 1
        else:
            left, number = room.pop(place)
            bins[number].append(item)
            left -= lengths[item]
        bisect.insort(room, (left, number))
    return bins
