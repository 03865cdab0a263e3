"""rewards_N -> rewards_N: what is done to rewards before they are compared."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths_N: Tensor, max_tokens: int, buffer: float, penalty: float) -> Tensor:
    """0 up to max - buffer, then linear down to -penalty at max: DAPO (2503.14476) equation 13."""
    over_N = lengths_N.double() - (max_tokens - buffer)
    return -penalty * (over_N / buffer).clamp(0, 1)


def repetition(token_ids: list[int], n: int = 4) -> float:
    """Share of the n-grams of a response that were there before: 0 for a text without repeats, near 1 for a loop."""
    grams = len(token_ids) - n + 1
    if grams <= 0:
        return 0.0
    return 1 - len({tuple(token_ids[i : i + n]) for i in range(grams)}) / grams
