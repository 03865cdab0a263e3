"""Surrogates that bound the ratio to the old policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fivefold.algo.segments import Segments
from fivefold.algo.surrogate import Metrics, Surrogate, ratio
from fivefold.keys.ranges import above, at_least, within
from fivefold.lazy import Tensor, torch

if TYPE_CHECKING:
    from fivefold.algo.part import Case


@dataclass(frozen=True)
class Clipped(Surrogate):
    """min(ρA, clip(ρ, 1 - low, 1 + high) A): PPO (1707.06347) equation 7."""

    clip_low: Annotated[float, within("[0, 1]")] = 0.2
    clip_high: Annotated[float, at_least(0)] = 0.2
    """Bounds of the ratio below and above 1 (gmpo: of its logarithm)."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        ratio_T = ratio(log_ratio_T)
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)

    def clipped(self, ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
        """Tokens whose gradient is removed by clipping."""
        low_T = (ratio_T < 1 - self.clip_low) & (advantages_T < 0)
        return low_T | ((ratio_T > 1 + self.clip_high) & (advantages_T > 0))

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        return {"policy/clip_fraction": self.clipped(ratio(log_ratio_T), advantages_T).float()}


@dataclass(frozen=True)
class PPOClip(Clipped):
    """PPO's clipped ratio; clip_high > clip_low is DAPO's clip-higher (2503.14476)."""

    name = "ppo_clip"
    vanishes = True
    reports = (("policy/dual_clip_fraction", "fraction", "Tokens that dual_clip bounds."),)
    dual_clip: Annotated[float, above(1)] | None = None
    """c of dual-clip PPO; off if left out."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        objective_T = super().__call__(log_ratio_T, logprobs_T, advantages_T, samples)
        if self.dual_clip is None:
            return objective_T
        # Where A < 0 the objective is at least c·A (1912.09729 equation 5), so that one token cannot dominate.
        bounded_T = torch.maximum(objective_T, self.dual_clip * advantages_T)
        return torch.where(advantages_T < 0, bounded_T, objective_T)

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        metrics = super().metrics(log_ratio_T, advantages_T, samples)
        if self.dual_clip is not None:
            metrics["policy/dual_clip_fraction"] = ((advantages_T < 0) & (ratio(log_ratio_T) > self.dual_clip)).float()
        return metrics

    @classmethod
    def check(cls, case: Case) -> None:
        chosen = case.chosen
        if chosen.dual_clip is not None:
            bound = 1 + chosen.clip_high
            message = f"must be above 1 + clip_high = {bound:g}: got {chosen.dual_clip:g}"
            case.findings.require(not 1 < chosen.dual_clip <= bound, "dual_clip", message)


@dataclass(frozen=True)
class GMPO(Surrogate):
    """A · exp(mean over the response of the clipped log ρ): geometric-mean policy optimization (2507.20673).

    log ρ is clipped to [-low, high] where that lowers the objective, token by token. Every token holds the value of its
    response.
    """

    name = "gmpo"
    levels = ("token",)
    vanishes = True
    clip_low: Annotated[float, at_least(0)] = 0.4
    clip_high: Annotated[float, at_least(0)] = 0.4

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        sign_T = advantages_T.sign()
        bounded_T = log_ratio_T.clamp(-self.clip_low, self.clip_high)
        pessimistic_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * bounded_T)
        ratio_N = ratio(samples.means(pessimistic_T))
        return (samples.means(advantages_T) * ratio_N)[samples.sample_T]

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        outside_T = (log_ratio_T > self.clip_high) & (advantages_T > 0)
        return {"policy/clip_fraction": (outside_T | ((log_ratio_T < -self.clip_low) & (advantages_T < 0))).float()}


@dataclass(frozen=True)
class CISPO(Surrogate):
    """sg(clip(ρ, 1 - low, 1 + high)) A log π: MiniMax-M1 (2506.13585) equation 4. Weights are bounded; no token loses its
    gradient."""

    name = "cispo"
    vanishes = True
    # 1: no lower bound, as in the paper, which gives no upper bound; 0.2 is PPO's.
    clip_low: Annotated[float, within("[0, 1]")] = 1.0
    clip_high: Annotated[float, at_least(0)] = 0.2

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        weight_T = ratio(log_ratio_T).clamp(1 - self.clip_low, 1 + self.clip_high).detach()
        return weight_T * advantages_T * logprobs_T

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        ratio_T = ratio(log_ratio_T)
        return {"policy/clip_fraction": ((ratio_T < 1 - self.clip_low) | (ratio_T > 1 + self.clip_high)).float()}


@dataclass(frozen=True)
class SAPO(Surrogate):
    """4/τ · σ(τ (ρ - 1)) A, where τ depends on the sign of A: SAPO (2511.20347). The gradient fades instead of ending at a
    bound."""

    name = "sapo"
    vanishes = True
    temperature_positive: Annotated[float, above(0)] = 1.0
    temperature_negative: Annotated[float, above(0)] = 1.05
    """Steepness of SAPO's gate for advantages above 0, and for all others."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        ratio_T = ratio(log_ratio_T)
        temperature_T = torch.where(advantages_T > 0, self.temperature_positive, self.temperature_negative)
        return 4 / temperature_T * torch.sigmoid(temperature_T * (ratio_T - 1)) * advantages_T
