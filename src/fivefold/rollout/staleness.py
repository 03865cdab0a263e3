"""Which groups may be sampled ahead, and which a step takes: no token that is trained on is too old. Numbers only.

A step takes `per_step` groups. A group that was given out when v steps were finished may be used up to step v + k, k being
`max_staleness`, rounded up: its deadline. At most (k + 1) x `per_step` groups are given out and not used (AReaL's rule,
2505.24298, section 5.1: given out in all <= (k + v + 1) x `per_step`), so that the deadlines of all can be met. k may be a
part of a step, as verl's staleness_threshold is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """The rule, with its numbers."""

    max_staleness: float
    per_step: int
    steps: int
    """Of the run: nothing is sampled for a step behind its end."""
    oversample: float = 0.0
    """More groups that are given out than the rule allows, as a share of a step's: those that come last are cut."""

    @property
    def oldest(self) -> int:
        """Steps that a sample may be old."""
        return math.ceil(self.max_staleness)

    def room(self, unused: int, step: int) -> int:
        """How many more may be given out before `step` (counted from 0), where so many are and were not used."""
        steps = min(self.max_staleness + 1, self.steps - step)
        # 1.15 x 100 is 115 groups, though not in floating point.
        ahead = math.floor(steps * self.per_step + 1e-6)
        return max(0, ahead + round(self.oversample * self.per_step) * (steps > 0) - unused)

    def deadline(self, given_out: int) -> int:
        """The last step that may use what was given out before step `given_out`."""
        return given_out + self.oldest

    def choose(self, unused: Mapping[int, int], ready: Collection[int], step: int, cuts: bool) -> list[int] | None:
        """The groups that `step` takes, by their place in the run; None where it has to wait.

        `unused`: place -> step before which it was given out; `ready`: those that are complete. Without `cuts` the next ones
        in their order, which are those that are due: what is given out as early as may be leaves no room for another order.
        With them the oldest that are complete.
        """
        if cuts:
            chosen = sorted(ready, key=lambda place: (unused[place], place))[: self.per_step]
        else:
            chosen = sorted(unused)[: self.per_step]
        is_whole = len(chosen) == self.per_step and set(chosen) <= set(ready)
        return sorted(chosen) if is_whole else None

    def overdue(self, unused: Mapping[int, int], step: int) -> list[int]:
        """What may not be used behind `step`."""
        return sorted(place for place, given_out in unused.items() if self.deadline(given_out) <= step)


def staleness(versions: Sequence[tuple[int, int]], version: int, step: int) -> int:
    """Steps between the weights of this version and `step`.

    `versions` has (step, optimizer steps taken before it), in order. Weights that no update has changed are those of the
    last step that had them.
    """
    born = bisect_right(versions, version, key=lambda each: each[1]) - 1
    return step - versions[max(0, born)][0]
