"""Samples of a step -> those that carry loss, by truncation and by how difficult their prompt was."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.part import Case, Part, usual
from fivefold.keys.ranges import within
from fivefold.lazy import Tensor, torch

if TYPE_CHECKING:
    from fivefold.types import RolloutStats


@dataclass(frozen=True)
class SampleFilter(Part):
    """Leaves responses out of the loss and of its denominators."""

    overlong_filter: bool = usual(False)
    """Leave truncated responses out of the loss and its denominators."""
    overlong_zero: bool = usual(False)
    """Give the tokens of truncated responses whose reward is 0, before it is shaped, the advantage 0. Means, whitening and
    denominators still count these responses, and a critic learns from them."""
    difficulty_low: Annotated[float, within("[-1e9, 1e9]")] | None = None
    difficulty_high: Annotated[float, within("[-1e9, 1e9]")] | None = None
    """Bounds on a prompt's mean reward: only prompts above the one and below the other count. Responses to all others carry
    no loss and do not count in the denominators. Off if left out."""
    difficulty_by: Literal["reward", "correct", "spread"] = usual("reward")
    """Quantity that `difficulty_low` and `difficulty_high` bound: the mean reward, the mean correctness (1 or 0), or the
    spread. The spread is the difference between the best and the worst reward, as the method shapes rewards; with it,
    prompts are left out after `whiten`."""

    def kept(self, stats: RolloutStats, shaped: AdvantageInputs) -> Tensor | None:
        """[N] samples that carry loss; None if all do. `shaped` has the step's rewards as the method shapes them."""
        kept_N = None
        if self.overlong_filter:
            kept_N = stats.finished_N
        if self.difficulty_low is not None or self.difficulty_high is not None:
            judged_N = self._difficulty(stats, shaped)
            low = -math.inf if self.difficulty_low is None else self.difficulty_low
            high = math.inf if self.difficulty_high is None else self.difficulty_high
            fair_N = (judged_N > low) & (judged_N < high)
            kept_N = fair_N if kept_N is None else kept_N & fair_N
        return kept_N if kept_N is None or stats.expert_N is None else kept_N | stats.expert_N

    @property
    def before_whitening(self) -> SampleFilter:
        """The filter for samples over whose tokens advantages are whitened: prompts left out by spread are among them."""
        return replace(self, difficulty_low=None, difficulty_high=None) if self.difficulty_by == "spread" else self

    def _difficulty(self, stats: RolloutStats, shaped: AdvantageInputs) -> Tensor:
        """[N] difficulty statistic of each sample's prompt."""
        if self.difficulty_by == "spread":
            return shaped.group_extremes("amax") - shaped.group_extremes("amin")
        inputs = AdvantageInputs(stats.rewards_N, stats.group_N, stats.response_lengths_N)
        judged_N = stats.rewards_N if self.difficulty_by == "reward" else stats.correct_N.double()
        return inputs.group_sums(judged_N) / inputs.count_N

    def zeroed(self, inputs: AdvantageInputs) -> Tensor:
        """[N] whether the method gives a response advantage 0, as it was truncated without a reward."""
        if not self.overlong_zero:
            return torch.zeros(len(inputs.rewards_N), dtype=torch.bool)
        assert inputs.truncated_N is not None and inputs.unrewarded_N is not None
        without_N = inputs.truncated_N & inputs.unrewarded_N
        return without_N if inputs.expert_N is None else without_N & ~inputs.expert_N

    @classmethod
    def check(cls, case: Case) -> None:
        case.require_off("overlong_filter", "overlong_zero", "difficulty_low", "difficulty_high", "difficulty_by")
        low, high = case.chosen.difficulty_low, case.chosen.difficulty_high
        if low is not None and high is not None:
            message = f"must satisfy difficulty_low < difficulty_high: got {low:g} and {high:g}"
            case.findings.require(low < high, "difficulty_low and difficulty_high", message)
        if case.overrides.difficulty_by is not None and low is None and high is None:
            case.findings.ignore("difficulty_by", "neither difficulty_low nor difficulty_high is set")
