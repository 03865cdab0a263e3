"""Objective term for expert responses, added to the objective of the sampled responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fivefold.algo.aggregate import Aggregate


@dataclass(frozen=True)
class Imitation:
    """(1 - μ) · objective of the sampled responses + μ · log-likelihood of the expert's responses: CHORD (2508.11408)."""

    weight: float
    """μ after warm-up, before its decay."""
    final_weight: float
    warmup_updates: int
    decay_updates: int
    token_weight: Literal["none", "phi"]
    aggregate: Aggregate

    def share(self, update: int) -> float:
        """μ in the optimizer step `update` of the run, counted from 1: rises linearly from 0, then decays along a cosine."""
        if update < self.warmup_updates:
            return self.weight * update / self.warmup_updates
        behind = update - self.warmup_updates
        if behind >= self.decay_updates:
            return self.final_weight
        cosine = 0.5 * (1 + math.cos(math.pi * behind / self.decay_updates))
        return self.final_weight + (self.weight - self.final_weight) * cosine

    def __call__(self, logprobs_T: Tensor) -> Tensor:
        """log π of each token. CHORD-φ weights it by p (1 - p), so that tokens teach little where the policy is certain of
        them or considers them impossible."""
        if self.token_weight == "none":
            return logprobs_T
        p_T = logprobs_T.detach().exp()
        return p_T * (1 - p_T) * logprobs_T
