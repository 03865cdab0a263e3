"""Surrogates without a ratio: log-likelihoods, weighted by the advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fivefold.algo.segments import Segments
from fivefold.algo.surrogate import Surrogate
from fivefold.keys.ranges import at_least
from fivefold.lazy import Tensor


@dataclass(frozen=True)
class LogLikelihood(Surrogate):
    """A · log π: REINFORCE, and cross-entropy on given completions when every A is 1."""

    name = "log_likelihood"
    ratio_reference = "nothing"
    levels = ()
    vanishes = True

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        return logprobs_T * advantages_T


@dataclass(frozen=True)
class OPMD(Surrogate):
    """A · log π / (1 + τ): online policy mirror descent, Trinity-RFT (2505.17826); τ keeps the policy close to its previous
    version."""

    name = "opmd"
    ratio_reference = "nothing"
    levels = ()
    vanishes = True
    tau: Annotated[float, at_least(0)] = 1.0
    """τ of OPMD: the objective is divided by 1 + τ."""

    def __call__(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, samples: Segments) -> Tensor:
        return logprobs_T * advantages_T / (1 + self.tau)
