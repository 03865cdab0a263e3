"""rewards_N -> rewards_N: reward changes that apply before rewards are compared."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def overlong_penalty(lengths_N: Tensor, max_tokens: int, buffer: float, penalty: float) -> Tensor:
    """0 up to max - buffer, then linear down to -penalty at max: DAPO (2503.14476) equation 13."""
    over_N = lengths_N.double() - (max_tokens - buffer)
    return -penalty * (over_N / buffer).clamp(0, 1)


def repetition(token_ids: list[int], n: int = 4) -> float:
    """Share of n-grams of a response that occurred earlier in it: 0 for a text without repeats, near 1 for a loop."""
    grams = len(token_ids) - n + 1
    if grams <= 0:
        return 0.0
    tokens = np.asarray(token_ids, dtype=np.uint64)
    # A 64-bit hash of each n-gram; a chance collision does not matter for a share.
    numbers = np.zeros(grams, dtype=np.uint64)
    for place in range(n):
        numbers = numbers * np.uint64(0x9E3779B97F4A7C15) + tokens[place : place + grams] + np.uint64(1)
    return 1 - len(np.unique(numbers)) / grams
