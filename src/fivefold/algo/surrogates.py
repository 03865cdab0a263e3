"""log-ratio to the policy before the update, logprobs, advantages -> what each token adds to the objective (maximised)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Surrogate(Protocol):
    @property
    def needs_old_logprobs(self) -> bool:
        """It compares with the log-probs before the update."""
        ...

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor) -> Tensor: ...


def ratio(log_ratio_T: Tensor) -> Tensor:
    """ρ = π / π_old; the bound keeps exp() finite, and beyond ±20 every method has clipped long before."""
    return log_ratio_T.clamp(-20, 20).exp()


@dataclass(frozen=True)
class PPOClip:
    """min(ρA, clip(ρ, 1 - low, 1 + high) A): PPO (1707.06347) equation 7; high > low is DAPO's clip-higher (2503.14476)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c: where A < 0 the objective is at least c·A (1912.09729 equation 5), so that one token cannot dominate."""
    needs_old_logprobs: bool = True

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
        ratio_T = ratio(log_ratio_T)
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        if self.dual_clip is None:
            return objective_T
        bounded_T = torch.maximum(objective_T, self.dual_clip * advantages_T)
        return torch.where(advantages_T < 0, bounded_T, objective_T)


@dataclass(frozen=True)
class CISPO:
    """sg(clip(ρ, 1 - low, 1 + high)) A log π: MiniMax-M1 (2506.13585). Weights are bounded, no gradient is lost."""

    clip_low: float = 1.0
    """1: the weight is not bounded below, as in the paper."""
    clip_high: float = 0.2
    """The paper names no value; 0.2 is what PPO takes."""
    needs_old_logprobs: bool = True

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
        weight_T = ratio(log_ratio_T).clamp(1 - self.clip_low, 1 + self.clip_high).detach()
        return weight_T * advantages_T * logprobs_T


@dataclass(frozen=True)
class SoftGate:
    """4/τ · σ(τ (ρ - 1)) A with τ by the sign of A: SAPO (2511.20347). The gradient fades instead of ending at a bound."""

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    needs_old_logprobs: bool = True

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
        ratio_T = ratio(log_ratio_T)
        temperature_T = torch.where(advantages_T > 0, self.temperature_positive, self.temperature_negative)
        return 4 / temperature_T * torch.sigmoid(temperature_T * (ratio_T - 1)) * advantages_T


@dataclass(frozen=True)
class LogLikelihood:
    """A · log π: REINFORCE, and cross-entropy on given completions when every A is 1."""

    needs_old_logprobs: bool = False

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
        return logprobs_T * advantages_T
