"""rewards_N -> rewards_N: reward changes that apply before rewards are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fivefold.algo.part import Case, Part, usual
from fivefold.keys.ranges import above, at_least, within
from fivefold.lazy import Tensor


@dataclass(frozen=True)
class RewardShaping(Part):
    """Changes of the rewards of a step, in this order: overlong penalty, shift, scale, clipping."""

    reward_shift: Annotated[float, within("[-1e6, 1e6]")] = usual(0.0)
    """Shift added to every reward, after the overlong penalty."""
    reward_scale: Annotated[float, within("(0, 1e6]")] = usual(1.0)
    """Factor of every reward, after `reward_shift`."""
    reward_clip: Annotated[float, above(0)] | None = None
    """Clip rewards to ± this."""
    overlong_buffer: Annotated[float, at_least(0)] = usual(0.0)
    """Number of tokens before `data.max_response_tokens` (with several turns: the most that a trajectory can sample) over
    which a penalty grows to `overlong_penalty`; below 1 a share of that length, 0 for none."""
    overlong_penalty: Annotated[float, at_least(0)] = usual(1.0)
    """Penalty of a response of maximum length."""

    def __call__(self, rewards_N: Tensor, lengths_N: Tensor, max_response_tokens: int) -> Tensor:
        """[N] shaped rewards of responses with these lengths in tokens."""
        if self.overlong_buffer:
            share = self.overlong_buffer < 1
            buffer = self.overlong_buffer * max_response_tokens if share else self.overlong_buffer
            rewards_N = rewards_N + overlong_penalty(lengths_N, max_response_tokens, buffer, self.overlong_penalty)
        if self.reward_shift or self.reward_scale != 1:
            rewards_N = (rewards_N + self.reward_shift) * self.reward_scale
        if self.reward_clip is not None:
            rewards_N = rewards_N.clamp(-self.reward_clip, self.reward_clip)
        return rewards_N

    @classmethod
    def check(cls, case: Case) -> None:
        case.require_off("reward_shift", "reward_scale", "reward_clip", "overlong_buffer", "overlong_penalty")
        if case.overrides.overlong_penalty is not None and not case.chosen.overlong_buffer:
            case.findings.ignore("overlong_penalty", "overlong_buffer is 0")


def overlong_penalty(lengths_N: Tensor, max_tokens: int, buffer: float, penalty: float) -> Tensor:
    """0 up to max - buffer, then linear down to -penalty at max: DAPO (2503.14476) equation 13."""
    over_N = lengths_N.double() - (max_tokens - buffer)
    return -penalty * (over_N / buffer).clamp(0, 1)


def repetition(token_ids: list[int], n: int = 4) -> float:
    """Share of n-grams of a response that occurred earlier in it: 0 for a text without repeats, near 1 for a loop."""
    import numpy as np

    grams = len(token_ids) - n + 1
    if grams <= 0:
        return 0.0
    tokens = np.asarray(token_ids, dtype=np.uint64)
    # A 64-bit hash of each n-gram; a chance collision does not matter for a share.
    numbers = np.zeros(grams, dtype=np.uint64)
    for place in range(n):
        numbers = numbers * np.uint64(0x9E3779B97F4A7C15) + tokens[place : place + grams] + np.uint64(1)
    return 1 - len(np.unique(numbers)) / grams
