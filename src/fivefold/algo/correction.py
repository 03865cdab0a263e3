"""old_logprobs, rollout_logprobs -> weights of tokens that make up for samples of another policy than the trainer's.

Truncated importance sampling (TIS): Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(2025); masked (MIS) and sequence-level forms: Liu et al., "When Speed Kills Stability" (2025); IcePop: Ring-1T
(2510.18855); decoupled PPO: AReaL (2505.24298).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.algo.segments import Segments

Level = Callable[[Tensor, Segments], Tensor]
"""log trainer - log engine of each token, samples -> the ratio that a token is weighted by."""


@dataclass(frozen=True)
class Correction:
    """weight = trainer / engine, kept within bounds, and rejection of what lies too far off."""

    weight: str | Level = "none"
    """none, token, sequence, geometric, or a function of the user's."""
    low: float = 0.0
    high: float = 2.0
    outside: str = "truncate"
    reject: str = "none"
    reject_low: float = 0.0
    reject_high: float = 2.0

    @property
    def is_active(self) -> bool:
        return self.weight != "none" or self.reject != "none"

    def __call__(self, log_ratio_T: Tensor, samples: Segments) -> tuple[Tensor, Tensor]:
        """(weight_T of the surrogate, kept_T) from log trainer - log engine; neither has a gradient.

        Denominators of the loss are not touched: what is masked or rejected still counts in them.
        """
        weight_T = torch.ones_like(log_ratio_T)
        if self.weight != "none":
            raw_T = ratio_at(self.weight, log_ratio_T, samples)
            weight_T = raw_T.clamp(self.low, self.high)
            if self.outside == "mask":
                weight_T = torch.where((raw_T >= self.low) & (raw_T <= self.high), raw_T, 0.0)
        kept_T = torch.ones_like(samples.mask_T)
        if self.reject != "none":
            raw_T = ratio_at(self.reject, log_ratio_T, samples)
            kept_T = (raw_T >= self.reject_low) & (raw_T <= self.reject_high)
        return weight_T, kept_T

    def metrics(self, log_ratio_T: Tensor, weight_T: Tensor, kept_T: Tensor, samples: Segments) -> dict[str, Tensor]:
        """Numbers a token, of which the mean over tokens is reported."""
        raw_T = ratio_at(self.reject if self.weight == "none" else self.weight, log_ratio_T, samples)
        final_T = weight_T * kept_T
        return {
            "rollout_correction/ratio_mean": raw_T,
            "rollout_correction/weight_mean": final_T,
            "rollout_correction/weight_square_mean": final_T.square(),
            "rollout_correction/bounded_fraction": ((raw_T < self.low) | (raw_T > self.high)).float()
            * (self.weight != "none"),
            "rollout_correction/masked_fraction": (weight_T == 0).float(),
            "rollout_correction/rejected_fraction": (~kept_T).float(),
        }


def ratio_at(level: str | Level, log_ratio_T: Tensor, samples: Segments) -> Tensor:
    """trainer / engine of each token, or of its response: the product over its tokens, or that product's geometric mean."""
    if not isinstance(level, str):
        return level(log_ratio_T, samples)
    if level == "sequence":
        log_ratio_T = samples.sums(log_ratio_T)[samples.sample_T]
    elif level == "geometric":
        log_ratio_T = samples.means(log_ratio_T)[samples.sample_T]
    return log_ratio_T.clamp(-20, 20).exp()
