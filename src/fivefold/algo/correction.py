"""old_logprobs, rollout_logprobs -> token weights that correct for samples from a policy other than the trainer's.

Truncated importance sampling (TIS): Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(2025); masked (MIS) and sequence-level forms: Liu et al., "When Speed Kills Stability" (2025); IcePop: Ring-1T (2510.18855);
decoupled PPO: AReaL (2505.24298).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fivefold.algo.segments import Segments
from fivefold.config.methods import SECOND_MOMENT

Level = Callable[[Tensor, Segments], Tensor]
"""log trainer - log engine of each token, samples -> the ratio that a token is weighted by."""


@dataclass(frozen=True)
class Correction:
    """Weights tokens by trainer / engine within bounds, and rejects tokens or responses that are too far off."""

    weight: str | Level = "none"
    """Level of the weight: none, token, sequence, geometric, or a user function."""
    low: float = 0.0
    high: float = 2.0
    outside: str = "truncate"
    reject: str = "none"
    reject_low: float = 0.0
    reject_high: float = 2.0
    reject_divergence: Mapping[str, float] = field(default_factory=dict)
    """Upper bound by statistic."""

    @property
    def is_active(self) -> bool:
        return self.weight != "none" or self.reject != "none" or bool(self.reject_divergence)

    @property
    def second_moment(self) -> float | None:
        """Upper bound of the mean of (log trainer - log engine)² over the kept tokens of an update; None without one."""
        return self.reject_divergence.get(SECOND_MOMENT)

    def __call__(self, log_ratio_T: Tensor, samples: Segments) -> tuple[Tensor, Tensor]:
        """(weight_T of the surrogate, kept_T) from log trainer - log engine; neither has a gradient.

        Loss denominators do not change: masked and rejected tokens still count in them.
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
        for name, bound in self.reject_divergence.items():
            if name == SECOND_MOMENT:
                assert samples.selected_T is not None
                kept_T = kept_T & ~samples.selected_T
            else:
                kept_T = kept_T & (divergence(name, log_ratio_T, samples) <= bound)
        return weight_T, kept_T

    def metrics(self, log_ratio_T: Tensor, weight_T: Tensor, kept_T: Tensor, samples: Segments) -> dict[str, Tensor]:
        """Return values per token; their mean over tokens is reported."""
        level = next((each for each in (self.weight, self.reject) if each != "none"), "token")
        raw_T = ratio_at(level, log_ratio_T, samples)
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


def interpolation(age_T: Tensor, updates: int) -> Tensor:
    """[T] (s - 1) / s for tokens that are s steps old, 0 for s <= 1.

    If log-probs change equally in each step, this is the position of the previous step's policy between the policy that
    sampled the token and the current one (A-3PO, 2512.06547). `age_T` counts optimizer steps; a step has `updates` of them.
    """
    return ((age_T - updates).double() / age_T.clamp(min=1)).clamp(min=0.0).float()


def divergence(name: str, log_ratio_T: Tensor, samples: Segments) -> Tensor:
    """[T] statistic of each token, or its sum, mean or maximum over the response, by a row of DIVERGENCES."""
    over, _, estimator = name.partition("_")
    bounded_T = log_ratio_T.clamp(-20, 20)
    if estimator == "k2":
        value_T = bounded_T.square() / 2
    else:
        value_T = -bounded_T if estimator == "drop" else bounded_T.expm1() - bounded_T
    if over == "token":
        return value_T
    return {"sum": samples.sums, "mean": samples.means, "max": samples.maxima}[over](value_T)[samples.sample_T]


def beyond_second_moment(log_ratio_S: Tensor, bound: float) -> Tensor:
    """[S] smallest set of tokens to leave out so that the mean (log ratio)² is below `bound`: M2PO (2510.01161).

    It takes those with the largest (log ratio)², and at least one token is kept.
    """
    square_S, order_S = log_ratio_S.double().square().sort(descending=True, stable=True)
    rest_S = square_S.flip(0).cumsum(0).flip(0) / torch.arange(len(square_S), 0, -1, device=square_S.device)
    below = (rest_S < bound).nonzero()
    count = int(below[0]) if len(below) else max(len(square_S) - 1, 0)
    found_S = torch.zeros_like(square_S, dtype=torch.bool)
    found_S[order_S[:count]] = True
    return found_S


def ratio_at(level: str | Level, log_ratio_T: Tensor, samples: Segments) -> Tensor:
    """[T] trainer / engine of each token, or of its response: the product over its tokens, or the geometric mean."""
    if not isinstance(level, str):
        return level(log_ratio_T, samples)
    if level == "sequence":
        log_ratio_T = samples.sums(log_ratio_T)[samples.sample_T]
    elif level == "geometric":
        log_ratio_T = samples.means(log_ratio_T)[samples.sample_T]
    return log_ratio_T.clamp(-20, 20).exp()
