"""Surrogates that treat the tokens of the highest covariance differently, selected among all of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fivefold.algo.segments import Segments
from fivefold.algo.surrogate import Surrogate, ratio
from fivefold.algo.surrogates.clipping import Clipped
from fivefold.keys.ranges import Range, above, within
from fivefold.lazy import Tensor, torch


def covariances(logprobs_S: Tensor, advantages_S: Tensor) -> Tensor:
    """(log π - mean log π)(A - mean A) of each token: 2505.22617."""
    logprobs, advantages = logprobs_S.double(), advantages_S.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


@dataclass(frozen=True)
class HighCovariance(Surrogate):
    """A surrogate that selects tokens of high covariance."""

    levels = ("token",)
    selects = True
    cov_fraction: Annotated[float, within("(0, 1]")] = 2e-4
    """Share of the update's tokens that clip_cov leaves out or kl_cov penalizes."""


@dataclass(frozen=True)
class ClipCov(HighCovariance, Clipped):
    """PPO's clipped ratio without some random tokens of high covariance: clip-cov (2505.22617)."""

    name = "clip_cov"
    cov_low: Annotated[float, Range()] = 1.0
    cov_high: Annotated[float, Range()] = 5.0
    """Range of the covariance from which clip_cov chooses tokens."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        assert samples.selected_T is not None
        objective_T = super().__call__(log_ratio_T, logprobs_T, advantages_T, samples)
        return torch.where(samples.selected_T, 0.0, objective_T)

    def select_tokens(self, logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, uniform_S: Tensor) -> Tensor:
        selected_S = torch.zeros(len(logprobs_S), dtype=torch.bool)
        cov_S = covariances(logprobs_S, advantages_S)
        free_S = ~self.clipped(ratio(logprobs_S - old_logprobs_S), advantages_S)
        candidates = ((cov_S > self.cov_low) & (cov_S < self.cov_high) & free_S).nonzero()[:, 0]
        count = max(1, int(self.cov_fraction * len(cov_S)))
        selected_S[candidates[uniform_S[candidates].argsort(stable=True)[:count]]] = True
        return selected_S


@dataclass(frozen=True)
class KLCov(HighCovariance):
    """ρA, minus coef · |log ρ| at the tokens of the highest covariance: kl-cov (2505.22617)."""

    name = "kl_cov"
    cov_kl_coef: Annotated[float, above(0)] = 1.0
    """Weight of kl_cov's penalty on its tokens."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        assert samples.selected_T is not None
        penalty_T = torch.where(samples.selected_T, self.cov_kl_coef * log_ratio_T.abs(), 0.0)
        return ratio(log_ratio_T) * advantages_T - penalty_T

    def select_tokens(self, logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, uniform_S: Tensor) -> Tensor:
        selected_S = torch.zeros(len(logprobs_S), dtype=torch.bool)
        count = min(len(selected_S), max(1, int(self.cov_fraction * len(selected_S))))
        cov_S = covariances(logprobs_S, advantages_S)
        selected_S[cov_S.argsort(descending=True, stable=True)[:count]] = True
        return selected_S
