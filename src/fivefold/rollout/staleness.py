"""Rules for which groups may be sampled ahead and which ones a step takes, so that no trained token is too old. Numbers
only.

A step takes `per_step` groups. A group that was given out when v steps were finished may be used up to step v + k, its
deadline; k is `max_staleness`, rounded up. At most (k + 1) x `per_step` groups are given out and unused, so that all
deadlines can be met. This is AReaL's rule (2505.24298, section 5.1): given out in all <= (k + v + 1) x `per_step`. k may be
a fraction of a step, like verl's staleness_threshold.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fivefold.types import Sample


@dataclass(frozen=True)
class Admission:
    """The admission rule with its numbers."""

    max_staleness: float
    per_step: int
    steps: int
    """Number of steps of the run; nothing is sampled for a step after its end."""
    oversample: float = 0.0
    """Extra groups given out beyond the rule, as a share of a step's groups; the last ones to complete are cut."""

    @property
    def oldest(self) -> int:
        """Maximum age of a sample, in steps."""
        return math.ceil(self.max_staleness)

    def room(self, unused: int, step: int) -> int:
        """Return how many more groups may be given out before `step` (counted from 0), given the number of unused ones."""
        steps = min(self.max_staleness + 1, self.steps - step)
        # 1.15 x 100 must give 115 groups, but is slightly less in floating point.
        ahead = math.floor(steps * self.per_step + 1e-6)
        return max(0, ahead + round(self.oversample * self.per_step) * (steps > 0) - unused)

    def deadline(self, given_out: int) -> int:
        """Return the last step that may use a group given out before step `given_out`."""
        return given_out + self.oldest

    def choose(self, unused: Mapping[int, int], ready: Collection[int], step: int, cuts: bool) -> list[int] | None:
        """Return the groups that `step` takes, by their place in the run; None if it has to wait.

        `unused`: place -> step before which the group was given out; `ready`: the complete groups. Without `cuts` the step
        takes the next groups in order, which are those that are due: giving out as early as allowed permits no other order.
        With `cuts` it takes the oldest complete groups.
        """
        if cuts:
            chosen = sorted(ready, key=lambda place: (unused[place], place))[: self.per_step]
        else:
            chosen = sorted(unused)[: self.per_step]
        is_whole = len(chosen) == self.per_step and set(chosen) <= set(ready)
        return sorted(chosen) if is_whole else None

    def overdue(self, unused: Mapping[int, int], step: int) -> list[int]:
        """Return the groups that may not be used after `step`."""
        return sorted(place for place, given_out in unused.items() if self.deadline(given_out) <= step)

    def check(self, ages: Sequence[int], step: int) -> None:
        """Raise RuntimeError if a sample that `step` uses is older than it may be; `ages` are in steps."""
        if max(ages, default=0) > self.oldest:
            raise RuntimeError(
                f"a sample of step {step + 1} is {max(ages)} steps old, rollout.max_staleness is {self.max_staleness:g}: "
                "the engine has used weights that it should not have had"
            )


def oldest_version(sample: Sample) -> int:
    """Return the optimizer steps taken by the weights that sampled the oldest token with loss."""
    if sample.token_versions is None or sample.loss_mask is None:
        return sample.policy_version
    sampled = [version for version, is_own in zip(sample.token_versions, sample.loss_mask, strict=True) if is_own]
    return min(sampled, default=sample.policy_version)


def staleness(versions: Sequence[tuple[int, int]], version: int, step: int) -> int:
    """Return the number of steps between the weights of `version` and `step`.

    `versions` has (step, optimizer steps taken before it), in order. Weights that no update changed belong to the last step
    that had them.
    """
    born = bisect_right(versions, version, key=lambda entry: entry[1]) - 1
    return step - versions[max(0, born)][0]
