"""old_logprobs, rollout_logprobs -> weights of tokens that make up for samples of another policy than the trainer's.

Truncated importance sampling (TIS): Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(2025); masked (MIS) and sequence-level forms: Liu et al., "When Speed Kills Stability" (2025); IcePop: Ring-1T
(2510.18855); decoupled PPO: AReaL (2505.24298).
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
    """weight = trainer / engine, kept within bounds, and rejection of what lies too far off."""

    weight: str | Level = "none"
    """none, token, sequence, geometric, or a function of the user's."""
    low: float = 0.0
    high: float = 2.0
    outside: str = "truncate"
    reject: str = "none"
    reject_low: float = 0.0
    reject_high: float = 2.0
    reject_divergence: Mapping[str, float] = field(default_factory=dict)
    """Statistic -> its upper bound."""

    @property
    def is_active(self) -> bool:
        return self.weight != "none" or self.reject != "none" or bool(self.reject_divergence)

    @property
    def second_moment(self) -> float | None:
        """Bound of the mean of (log trainer - log engine)² over the tokens that are kept of an update."""
        return self.reject_divergence.get(SECOND_MOMENT)

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
        for name, bound in self.reject_divergence.items():
            if name == SECOND_MOMENT:
                assert samples.selected_T is not None
                kept_T = kept_T & ~samples.selected_T
            else:
                kept_T = kept_T & (divergence(name, log_ratio_T, samples) <= bound)
        return weight_T, kept_T

    def metrics(self, log_ratio_T: Tensor, weight_T: Tensor, kept_T: Tensor, samples: Segments) -> dict[str, Tensor]:
        """Numbers a token, of which the mean over tokens is reported."""
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
    """[T] (s - 1) / s, 0 for s <= 1, of tokens that are s steps old: where the policy of one step ago lies between the one
    that sampled a token and the one of now, if log-probs move alike in each step (A-3PO, 2512.06547).

    `age_T` counts optimizer steps, of which a step takes `updates`.
    """
    return ((age_T - updates).double() / age_T.clamp(min=1)).clamp(min=0.0).float()


def divergence(name: str, log_ratio_T: Tensor, samples: Segments) -> Tensor:
    """[T] a statistic of each token, or its sum, mean or largest value in its response, by a row of DIVERGENCES."""
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
    """[S] the fewest tokens, of the largest (log ratio)², without which its mean is below `bound`: M2PO (2510.01161).

    One token is kept at least.
    """
    square_S, order_S = log_ratio_S.double().square().sort(descending=True, stable=True)
    rest_S = square_S.flip(0).cumsum(0).flip(0) / torch.arange(len(square_S), 0, -1, device=square_S.device)
    below = (rest_S < bound).nonzero()
    count = int(below[0]) if len(below) else max(len(square_S) - 1, 0)
    found_S = torch.zeros_like(square_S, dtype=torch.bool)
    found_S[order_S[:count]] = True
    return found_S


def ratio_at(level: str | Level, log_ratio_T: Tensor, samples: Segments) -> Tensor:
    """trainer / engine of each token, or of its response: the product over its tokens, or that product's geometric mean."""
    if not isinstance(level, str):
        return level(log_ratio_T, samples)
    if level == "sequence":
        log_ratio_T = samples.sums(log_ratio_T)[samples.sample_T]
    elif level == "geometric":
        log_ratio_T = samples.means(log_ratio_T)[samples.sample_T]
    return log_ratio_T.clamp(-20, 20).exp()
