"""logprobs, old_logprobs, advantages -> what each token adds to the objective (to be maximised)."""

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

    def __call__(self, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PPOClip:
    """min(ρA, clip(ρ, 1 - low, 1 + high) A): PPO (1707.06347) equation 7."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    needs_old_logprobs: bool = True

    def __call__(self, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
        # Beyond ±20 the clipped branch decides anyway; the bound keeps exp() finite.
        ratio_T = (logprobs_T - old_logprobs_T).clamp(-20, 20).exp()
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)


@dataclass(frozen=True)
class LogLikelihood:
    """A · log π: cross-entropy on given completions when every A is 1."""

    needs_old_logprobs: bool = False

    def __call__(self, logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
        return logprobs_T * advantages_T
