"""Surrogates for samples of an older policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fivefold.algo.segments import Segments
from fivefold.algo.surrogate import Metrics, Surrogate, ratio
from fivefold.keys.ranges import OneOf, above, at_least, within
from fivefold.lazy import Tensor, torch

if TYPE_CHECKING:
    from fivefold.algo.part import Case


@dataclass(frozen=True)
class SPPO(Surrogate):
    """-(Σ log ρ - η A)²: self-play preference optimization (2405.00675). Each token holds the value of its response."""

    name = "sppo"
    levels = ("token",)
    eta: Annotated[float, above(0)] = 1.0
    """η of sppo: the log-ratio of a response is pulled toward η times its advantage."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        distance_N = samples.sums(log_ratio_T) - self.eta * samples.means(advantages_T)
        return -distance_N.square()[samples.sample_T]


@dataclass(frozen=True)
class TOPR(Surrogate):
    """A · log π where A > 0, sg(min(ρ, 1)) A · log π elsewhere: tapered off-policy REINFORCE (2503.14286) equation 8."""

    name = "topr"
    levels = ("token",)
    vanishes = True

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        weight_T = torch.where(advantages_T > 0, 1.0, ratio(log_ratio_T).clamp(max=1)).detach()
        return weight_T * advantages_T * logprobs_T

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        return {"policy/clip_fraction": ((advantages_T <= 0) & (log_ratio_T > 0)).float()}


@dataclass(frozen=True)
class REC(Surrogate):
    """w M A · log π + c log π - λ (log ρ)²: group-relative REINFORCE (2509.24203). Mask M and weight w depend on the ratio.

    M and w have no gradient. The last term is from Kimi k1.5 (2501.12599 equation 3, whose ½ is part of λ).
    """

    name = "rec"
    levels = ("token", "sequence")
    vanishes = True
    unless = ("likelihood_coef", "proximal_coef")
    # Bounds, ring and coefficients are those of Trinity's default_args, whose authors are the paper's.
    clip_mode: Annotated[str, OneOf(("none", "one_sided", "two_sided", "ring"))] = "one_sided"
    """Tokens that rec leaves out. none: no tokens; one_sided: those whose ratio is beyond the bound in the direction of
    their advantage; two_sided: those outside either bound; ring: as two_sided, but tokens far out on the other side stay."""
    clip_low: Annotated[float, within("[0, 1]")] = 0.2
    clip_high: Annotated[float, at_least(0)] = 0.2
    ring_low: Annotated[float, within("[0, 1]")] = 0.6
    ring_high: Annotated[float, at_least(0)] = 2.0
    """Distance of the ring's outer edge below and above a ratio of 1."""
    token_weight: Annotated[str, OneOf(("none", "ratio", "advantage"))] = "none"
    """Token weight of rec: none; ratio; or advantage, e^(A / weight_temperature)."""
    weight_temperature: Annotated[float, above(0)] = 1.0
    likelihood_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the log-likelihood of all samples, which rec adds."""
    proximal_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of the squared log-ratio to the old policy, which rec subtracts."""

    def kept(self, ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
        """[T] tokens whose advantage counts. Where A = 0, meeting either bound is enough."""
        above_T, below_T = ratio_T >= 1 - self.clip_low, ratio_T <= 1 + self.clip_high
        if self.clip_mode == "none":
            return torch.ones_like(ratio_T, dtype=torch.bool)
        if self.clip_mode == "one_sided":
            return (below_T & (advantages_T >= 0)) | (above_T & (advantages_T <= 0))
        if self.clip_mode == "two_sided":
            return above_T & below_T
        far_below_T, far_above_T = ratio_T <= 1 - self.ring_low, ratio_T >= 1 + self.ring_high
        return (above_T & below_T) | (far_below_T & (advantages_T >= 0)) | (far_above_T & (advantages_T <= 0))

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        ratio_T = ratio(log_ratio_T).detach()
        weighted_T = advantages_T
        if self.token_weight == "ratio":
            weighted_T = advantages_T * ratio_T
        elif self.token_weight == "advantage":
            weighted_T = advantages_T * (advantages_T / self.weight_temperature).exp()
        gain_T = torch.where(self.kept(ratio_T, advantages_T), weighted_T, 0.0) * logprobs_T
        if self.likelihood_coef:
            gain_T = gain_T + self.likelihood_coef * logprobs_T
        if self.proximal_coef:
            gain_T = gain_T - self.proximal_coef * log_ratio_T.square()
        return gain_T

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        return {"policy/clip_fraction": (~self.kept(ratio(log_ratio_T), advantages_T)).float()}

    @classmethod
    def check(cls, case: Case) -> None:
        level = case.chosen.importance_sampling_level
        if case.chosen.proximal_coef and level != "token":
            message = f"is the squared log-ratio of each token: importance_sampling_level is {level}"
            case.findings.error("proximal_coef", message)
        mode, weight = case.chosen.clip_mode, case.chosen.token_weight
        for keys, is_used, reason in (
            (("clip_low", "clip_high"), mode != "none", "clip_mode is none"),
            (("ring_low", "ring_high"), mode == "ring", f"clip_mode is {mode}, not ring"),
            (("weight_temperature",), weight == "advantage", f"token_weight is {weight}, not advantage"),
        ):
            for key in (key for key in keys if not is_used and getattr(case.overrides, key) is not None):
                case.findings.ignore(key, reason)


DRIFT_BOUND = 2.0
"""Upper bound of ρ - 1 in CPGD's drift term."""


@dataclass(frozen=True)
class CPGD(Surrogate):
    """min(A log ρ, A clip(log ρ, log(1 - low), log(1 + high))) - drift_coef · sg(min(ρ - 1, 2)) log π: clipped policy
    gradient with policy drift (2505.12504).

    It weights and clips log-probs instead of ratios. The last term has the gradient of the KL to the old policy, ρ - 1 - log
    ρ, bounded above.
    """

    name = "cpgd"
    levels = ("token",)
    vanishes = True
    unless = ("drift_coef",)
    clip_low: Annotated[float, within("[0, 1]")] = 0.2
    clip_high: Annotated[float, at_least(0)] = 0.2
    drift_coef: Annotated[float, at_least(0)] = 0.0
    """Weight of cpgd's pull toward the old policy."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        low = math.log(1 - self.clip_low) if self.clip_low < 1 else -math.inf
        clipped_T = log_ratio_T.clamp(low, math.log(1 + self.clip_high))
        objective_T = torch.minimum(log_ratio_T * advantages_T, clipped_T * advantages_T)
        if not self.drift_coef:
            return objective_T
        drift_T = (ratio(log_ratio_T) - 1).clamp(max=DRIFT_BOUND).detach()
        return objective_T - self.drift_coef * drift_T * logprobs_T

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        ratio_T = ratio(log_ratio_T)
        low_T = (ratio_T < 1 - self.clip_low) & (advantages_T < 0)
        return {"policy/clip_fraction": (low_T | ((ratio_T > 1 + self.clip_high) & (advantages_T > 0))).float()}


@dataclass(frozen=True)
class DPPO(Surrogate):
    """sg(min(ρ, cap)) A · log π, 0 where a probability moved too far in the direction of A: 2602.04879 equations 13 and 14.

    The distance is π - π_old, or the KL of the binary distribution of this token against all others.
    """

    name = "dppo"
    levels = ("token",)
    vanishes = True
    divergence: Annotated[str, OneOf(("tv", "kl"))] = "tv"
    """Divergence that dppo bounds by clip_low and clip_high: the total variation (tv) or the KL (kl) of a token against all
    others."""
    clip_low: Annotated[float, at_least(0)] = 0.2
    clip_high: Annotated[float, at_least(0)] = 0.2
    ratio_cap: Annotated[float, above(0)] | None = None
    """Maximum ratio in dppo's token weights; off if left out."""

    def kept(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
        """[T] tokens that are within the bound or move back toward the old policy."""
        now_T, old_T = logprobs_T.exp(), (logprobs_T - log_ratio_T).exp()
        moved_T = now_T - old_T
        if self.divergence == "kl":
            rest_T = ((1 - old_T + 1e-8) / (1 - now_T + 1e-8)).log()
            moved_T = moved_T.sign() * (-old_T * log_ratio_T + (1 - old_T) * rest_T)
        return torch.where(advantages_T > 0, moved_T <= self.clip_high, moved_T >= -self.clip_low)

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        weight_T = ratio(log_ratio_T).clamp(max=self.ratio_cap).detach() if self.ratio_cap else ratio(log_ratio_T).detach()
        kept_T = self.kept(log_ratio_T.detach(), logprobs_T.detach(), advantages_T)
        return torch.where(kept_T, weight_T * advantages_T, 0.0) * logprobs_T
