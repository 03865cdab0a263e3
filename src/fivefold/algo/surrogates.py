"""log-ratio, logprobs, advantages -> the contribution of each token to the objective (maximized).

Each class is a formula. The row with the same name in config/methods.py defines what its ratio compares with, and the
defaults and ranges of its parameters. `fivefold check` reads those rows without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.algo.segments import Segments
from fivefold.config import methods

Metrics = dict[str, Tensor]


class Surrogate(Protocol):
    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor: ...

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        """Return values per token; their weighted mean is reported."""
        ...


class TokenSelector(Surrogate, Protocol):
    """Surrogate that treats some tokens differently, selected among all tokens of the update."""

    def select_tokens(self, logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, uniform_S: Tensor) -> Tensor:
        """[S] which response tokens of the whole update are selected; `uniform_S` has a random number in [0, 1) for each."""
        ...


def ratio(log_ratio_T: Tensor) -> Tensor:
    """ρ = π / π_old. The clamp to ±20 keeps exp() finite; every method clips far earlier."""
    return log_ratio_T.clamp(-20, 20).exp()


class _Plain:
    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        return {}


@dataclass(frozen=True, kw_only=True)
class PPOClip(_Plain):
    """min(ρA, clip(ρ, 1 - low, 1 + high) A): PPO (1707.06347) equation 7; high > low is DAPO's clip-higher (2503.14476)."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    """c: where A < 0 the objective is at least c·A (1912.09729 equation 5), so that one token cannot dominate."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        ratio_T = ratio(log_ratio_T)
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        if self.dual_clip is None:
            return objective_T
        bounded_T = torch.maximum(objective_T, self.dual_clip * advantages_T)
        return torch.where(advantages_T < 0, bounded_T, objective_T)

    def clipped(self, ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
        """Tokens whose gradient is removed by clipping."""
        low_T = (ratio_T < 1 - self.clip_low) & (advantages_T < 0)
        return low_T | ((ratio_T > 1 + self.clip_high) & (advantages_T > 0))

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        ratio_T = ratio(log_ratio_T)
        found = {"policy/clip_fraction": self.clipped(ratio_T, advantages_T).float()}
        if self.dual_clip is not None:
            found["policy/dual_clip_fraction"] = ((advantages_T < 0) & (ratio_T > self.dual_clip)).float()
        return found


@dataclass(frozen=True)
class GMPO(_Plain):
    """A · exp(mean over the response of the clipped log ρ): geometric-mean policy optimization (2507.20673).

    log ρ is clipped to [-low, high] where that lowers the objective, token by token. Every token holds the value of its
    response.
    """

    clip_low: float
    clip_high: float

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
class CISPO(_Plain):
    """sg(clip(ρ, 1 - low, 1 + high)) A log π: MiniMax-M1 (2506.13585) equation 4. Weights are bounded; no token loses its
    gradient."""

    clip_low: float
    clip_high: float

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        weight_T = ratio(log_ratio_T).clamp(1 - self.clip_low, 1 + self.clip_high).detach()
        return weight_T * advantages_T * logprobs_T

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        ratio_T = ratio(log_ratio_T)
        return {"policy/clip_fraction": ((ratio_T < 1 - self.clip_low) | (ratio_T > 1 + self.clip_high)).float()}


@dataclass(frozen=True)
class SAPO(_Plain):
    """4/τ · σ(τ (ρ - 1)) A, where τ depends on the sign of A: SAPO (2511.20347). The gradient fades instead of ending at a
    bound."""

    temperature_positive: float
    temperature_negative: float

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        ratio_T = ratio(log_ratio_T)
        temperature_T = torch.where(advantages_T > 0, self.temperature_positive, self.temperature_negative)
        return 4 / temperature_T * torch.sigmoid(temperature_T * (ratio_T - 1)) * advantages_T


@dataclass(frozen=True)
class LogLikelihood(_Plain):
    """A · log π: REINFORCE, and cross-entropy on given completions when every A is 1."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        return logprobs_T * advantages_T


@dataclass(frozen=True)
class OPMD(_Plain):
    """A · log π / (1 + τ): online policy mirror descent, Trinity-RFT (2505.17826); τ keeps the policy close to its previous
    version."""

    tau: float

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        return logprobs_T * advantages_T / (1 + self.tau)


@dataclass(frozen=True)
class TOPR(_Plain):
    """A · log π where A > 0, sg(min(ρ, 1)) A · log π elsewhere: tapered off-policy REINFORCE (2503.14286) equation 8."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        weight_T = torch.where(advantages_T > 0, 1.0, ratio(log_ratio_T).clamp(max=1)).detach()
        return weight_T * advantages_T * logprobs_T

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        return {"policy/clip_fraction": ((advantages_T <= 0) & (log_ratio_T > 0)).float()}


@dataclass(frozen=True)
class REC(_Plain):
    """w M A · log π + c log π - λ (log ρ)²: group-relative REINFORCE (2509.24203). Mask M and weight w depend on the ratio.

    M and w have no gradient. The last term is from Kimi k1.5 (2501.12599 equation 3, whose ½ is part of λ).
    """

    clip_mode: str
    clip_low: float
    clip_high: float
    ring_low: float
    ring_high: float
    token_weight: str
    weight_temperature: float
    likelihood_coef: float
    proximal_coef: float

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


@dataclass(frozen=True)
class DPPO(_Plain):
    """sg(min(ρ, cap)) A · log π, 0 where a probability moved too far in the direction of A: 2602.04879 equations 13 and 14.

    The distance is π - π_old, or the KL of the binary distribution of this token against all others.
    """

    divergence: str
    clip_low: float
    clip_high: float
    ratio_cap: float | None

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


DRIFT_BOUND = 2.0
"""Upper bound of ρ - 1 in CPGD's drift term."""


@dataclass(frozen=True)
class CPGD(_Plain):
    """min(A log ρ, A clip(log ρ, log(1 - low), log(1 + high))) - drift_coef · sg(min(ρ - 1, 2)) log π: clipped policy
    gradient with policy drift (2505.12504).

    It weights and clips log-probs instead of ratios. The last term has the gradient of the KL to the old policy, ρ - 1 - log
    ρ, bounded above.
    """

    clip_low: float
    clip_high: float
    drift_coef: float

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


def covariances(logprobs_S: Tensor, advantages_S: Tensor) -> Tensor:
    """(log π - mean log π)(A - mean A) of each token: 2505.22617."""
    logprobs, advantages = logprobs_S.double(), advantages_S.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


@dataclass(frozen=True, kw_only=True)
class ClipCov(PPOClip):
    """PPO's clipped ratio without some random tokens of high covariance: clip-cov (2505.22617)."""

    cov_fraction: float
    """r: share of the update's tokens that are left out."""
    cov_low: float
    cov_high: float

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        assert samples.selected_T is not None
        objective_T = super().__call__(log_ratio_T, logprobs_T, advantages_T, samples)
        return torch.where(samples.selected_T, 0.0, objective_T)

    def select_tokens(self, logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, uniform_S: Tensor) -> Tensor:
        found_S = torch.zeros(len(logprobs_S), dtype=torch.bool)
        cov_S = covariances(logprobs_S, advantages_S)
        free_S = ~self.clipped(ratio(logprobs_S - old_logprobs_S), advantages_S)
        candidates = ((cov_S > self.cov_low) & (cov_S < self.cov_high) & free_S).nonzero()[:, 0]
        count = max(1, int(self.cov_fraction * len(cov_S)))
        found_S[candidates[uniform_S[candidates].argsort(stable=True)[:count]]] = True
        return found_S


@dataclass(frozen=True)
class KLCov(_Plain):
    """ρA, minus coef · |log ρ| at the tokens of the highest covariance: kl-cov (2505.22617)."""

    cov_fraction: float
    """k: share of the update's tokens that are penalized."""
    cov_kl_coef: float

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        assert samples.selected_T is not None
        penalty_T = torch.where(samples.selected_T, self.cov_kl_coef * log_ratio_T.abs(), 0.0)
        return ratio(log_ratio_T) * advantages_T - penalty_T

    def select_tokens(self, logprobs_S: Tensor, old_logprobs_S: Tensor, advantages_S: Tensor, uniform_S: Tensor) -> Tensor:
        found_S = torch.zeros(len(logprobs_S), dtype=torch.bool)
        count = min(len(found_S), max(1, int(self.cov_fraction * len(found_S))))
        cov_S = covariances(logprobs_S, advantages_S)
        found_S[cov_S.argsort(descending=True, stable=True)[:count]] = True
        return found_S


@dataclass(frozen=True)
class DPO(_Plain):
    """log σ(β (log-ratio of the chosen - of the rejected response)), ratios to the reference: DPO (2305.18290) equation 7.

    Samples come in pairs, the chosen one first; each token holds the value of its pair. With label smoothing s it is (1 - s)
    log σ(m) + s log σ(-m) (conservative DPO).
    """

    beta: float
    label_smoothing: float

    def _margin(self, log_ratio_T: Tensor, samples: Segments) -> Tensor:
        pairs = samples.sums(log_ratio_T).view(-1, 2)
        return (self.beta * (pairs[:, 0] - pairs[:, 1])).repeat_interleave(2)

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        margin_N = self._margin(log_ratio_T, samples)
        value_N = (1 - self.label_smoothing) * F.logsigmoid(margin_N) + self.label_smoothing * F.logsigmoid(-margin_N)
        return value_N[samples.sample_T]

    def metrics(self, log_ratio_T: Tensor, advantages_T: Tensor, samples: Segments) -> Metrics:
        margin_N = self._margin(log_ratio_T, samples)
        rewards_N = self.beta * samples.sums(log_ratio_T)
        chosen_N = torch.arange(len(margin_N), device=margin_N.device) % 2 == 0
        found = {
            "policy/accuracy": (margin_N > 0).float(),
            "policy/margin": margin_N,
            # Each sample of a pair has half of the pair's weight.
            "policy/reward_chosen": torch.where(chosen_N, 2 * rewards_N, 0.0),
            "policy/reward_rejected": torch.where(chosen_N, 0.0, 2 * rewards_N),
        }
        return {name: value_N[samples.sample_T] for name, value_N in found.items()}


@dataclass(frozen=True)
class SPPO(_Plain):
    """-(Σ log ρ - η A)²: self-play preference optimization (2405.00675). Each token holds the value of its response."""

    eta: float

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        distance_N = samples.sums(log_ratio_T) - self.eta * samples.means(advantages_T)
        return -distance_N.square()[samples.sample_T]


@dataclass(frozen=True)
class UserSurrogate(_Plain):
    """Wraps a user function: log_ratio_T, logprobs_T, advantages_T, samples -> objective_T."""

    function: Callable[[Tensor, Tensor, Tensor, Segments], Tensor]

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        return self.function(log_ratio_T, logprobs_T, advantages_T, samples)


SURROGATES: dict[str, type[Surrogate]] = {
    "ppo_clip": PPOClip,
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "log_likelihood": LogLikelihood,
    "opmd": OPMD,
    "topr": TOPR,
    "rec": REC,
    "dppo": DPPO,
    "cpgd": CPGD,
    "sppo": SPPO,
    "dpo": DPO,
}


def make_surrogate(name: str, **numbers: float | str | None) -> Surrogate:
    """Return the surrogate `name`. Parameters left out take the values of its row in config/methods.py."""
    return SURROGATES[name](**methods.SURROGATES[name].numbers(numbers))
