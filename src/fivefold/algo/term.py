"""A term of the loss: one file in `algo/terms/` with its keys, rules, needs, loss and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fivefold.algo.part import Part
from fivefold.algo.segments import Segments
from fivefold.columns import Column
from fivefold.lazy import Tensor

if TYPE_CHECKING:
    from fivefold.types import TokenBatch


@dataclass(frozen=True)
class Progress:
    """State of a run that formulas depend on; its owner passes it in and saves it."""

    step: int = 0
    """Step in progress, from 0."""
    kl_coef: float | None = None
    """Coefficient of the KL penalty, which adapts if it has a target; None: that of the configuration."""


@dataclass(frozen=True)
class Tokens:
    """A micro-batch as the terms of its loss see it."""

    batch: TokenBatch
    samples: Segments
    logprobs_T: Tensor
    """Log-probs of the policy now, with their gradient."""
    entropy_T: Tensor
    old_T: Tensor
    """Log-probs that the ratio compares with."""
    log_ratio_T: Tensor
    """Log-ratio to them, at the importance sampling level of the method."""
    progress: Progress = Progress()

    @cached_property
    def sampled_T(self) -> Tensor:
        """Response tokens that were sampled: without prompts and an expert's responses."""
        expert_T = self.batch.columns.get(Column.EXPERT)
        return self.batch.loss_mask_T if expert_T is None else self.batch.loss_mask_T & ~expert_T

    @cached_property
    def share_T(self) -> Tensor:
        """Share of each sampled token in the mean over those of the update."""
        return self.sampled_T / max(self.batch.update_tokens - self.batch.expert_tokens, 1)

    def mean(self, values_T: Tensor) -> Tensor:
        """Return this micro-batch's part of the mean over the sampled tokens of the update."""
        return (values_T * self.share_T).sum()


@dataclass(frozen=True)
class Term(Part):
    """One summand of the loss of an update, weighted for each token. It adds nothing while it is not active."""

    weights = "penalty"
    """Weights of its tokens. penalty: by `algorithm.penalty_aggregate`, 0 for an expert's responses; loss: those of the
    surrogate, in which the expert has its share."""
    expert_only = False
    """Whether the loss of every sampled token is exactly 0: the term acts on an expert's responses alone."""

    @property
    def is_active(self) -> bool:
        """Whether the loss has this term."""
        return True

    def loss(self, tokens: Tokens) -> Tensor:
        """[T] value of each token, which is minimized."""
        raise NotImplementedError

    def metrics(self, tokens: Tokens) -> dict[str, Tensor]:
        """Return this micro-batch's part of each metric, also while the term is not active; see `Tokens.mean`."""
        return {}
