"""Imitation of an expert's responses, in the same updates as the responses that are sampled: CHORD (2508.11408)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from fivefold.algo.aggregate import AGGREGATES, LEGACY_AGGREGATE, Aggregate, aggregate_of
from fivefold.algo.correction import SECOND_MOMENT
from fivefold.algo.part import Case, usual
from fivefold.algo.surrogates import surrogate_class
from fivefold.algo.term import Term, Tokens
from fivefold.columns import Column
from fivefold.keys.ranges import NameOrCode, at_least, within
from fivefold.lazy import Tensor, torch


@dataclass(frozen=True)
class Imitation(Term):
    """Weight of the responses in `data.expert`, which are imitated in addition to the sampled ones; each choice is the
    method's if left out."""

    section = "expert"
    reports = (
        (
            "expert/logprob_mean",
            "nats",
            "Log-prob of an expert's tokens (`data.expert`), mean; other metrics leave them out.",
        ),
    )
    weights = "loss"
    expert_only = True
    weight: Annotated[float, within("[0, 1]")] | None = None
    """μ: the loss is (1 - μ) of the sampled responses' loss plus μ of the expert's cross-entropy. No expert if left out,
    unless the method has one."""
    final_weight: Annotated[float, within("[0, 1]")] | None = None
    """μ after its decay; constant if left out."""
    warmup_updates: Annotated[int, at_least(0)] = usual(0)
    """Number of optimizer steps over which μ rises from 0."""
    decay_updates: Annotated[int, at_least(0)] = usual(0)
    """Number of optimizer steps after the warm-up over which μ decays to `final_weight`, along a cosine."""
    token_weight: Literal["none", "phi"] = usual("none")
    """Token weight; phi: p (1 - p), where p is the token's probability."""
    aggregate: Annotated[str, NameOrCode(AGGREGATES)] = usual("token-mean")
    """Aggregation of the expert's tokens: one of AGGREGATES."""

    @cached_property
    def aggregation(self) -> Aggregate:
        return aggregate_of(self.aggregate)

    @property
    def is_active(self) -> bool:
        return self.weight is not None

    def share(self, update: int) -> float:
        """μ in the optimizer step `update` of the run, counted from 1: rises linearly from 0, then decays along a cosine."""
        assert self.weight is not None
        final = self.weight if self.final_weight is None else self.final_weight
        if update < self.warmup_updates:
            return self.weight * update / self.warmup_updates
        after = update - self.warmup_updates
        if after >= self.decay_updates:
            return final
        cosine = 0.5 * (1 + math.cos(math.pi * after / self.decay_updates))
        return final + (self.weight - final) * cosine

    def loss(self, tokens: Tokens) -> Tensor:
        """[T] -log π of the expert's tokens, 0 elsewhere. CHORD-φ weights it by p (1 - p), so that tokens teach little where
        the policy is certain of them or considers them impossible."""
        expert_T, logprobs_T = tokens.batch.columns.get(Column.EXPERT), tokens.logprobs_T
        if expert_T is None:
            return torch.zeros_like(logprobs_T)
        if self.token_weight == "phi":
            p_T = logprobs_T.detach().exp()
            logprobs_T = p_T * (1 - p_T) * logprobs_T
        return torch.where(expert_T, -logprobs_T, 0.0)

    def metrics(self, tokens: Tokens) -> dict[str, Tensor]:
        batch = tokens.batch
        if Column.EXPERT not in batch:
            return {}
        share_T = (batch.loss_mask_T & batch[Column.EXPERT]) / max(batch.expert_tokens, 1)
        return {"expert/logprob_mean": (tokens.logprobs_T.detach() * share_T).sum()}

    @classmethod
    def check(cls, case: Case) -> None:
        chosen, expert = case.chosen, case.chosen.expert
        if expert.weight is None:
            if case.overrides.expert != cls():
                case.findings.ignore("expert", "its weight is left out")
            return
        below = case.findings.at(cls.section)
        surrogate, by_moment = chosen.surrogate, SECOND_MOMENT in chosen.rollout_correction.reject_divergence
        impossible = (
            (case.offline, f"{case.name} learns from responses in the data alone"),
            (surrogate_class(surrogate).selects, f"{surrogate} chooses tokens among all of the update"),
            (by_moment, "rollout_correction chooses tokens among all of the update"),
            (chosen.credit != "response", f"credit: {chosen.credit} has no rewards there"),
            (chosen.whiten, "whiten is over all tokens of the step"),
            (str(chosen.advantage).startswith("step_"), f"{chosen.advantage} compares all rewards of the step"),
            (chosen.advantage == "greedy_baseline", "greedy_baseline needs another response to each prompt"),
            (chosen.kl.place == "reward" or chosen.kl.reward_coef, "a KL in the reward has no reward there"),
            (LEGACY_AGGREGATE in (chosen.aggregate, expert.aggregate), f"{LEGACY_AGGREGATE} is for all of the loss"),
        )
        for is_so, reason in impossible:
            below.require(not is_so, "weight", f"must be left out: {reason}")
        if case.overrides.expert.decay_updates and expert.final_weight is None:
            below.ignore("decay_updates", "without final_weight the weight does not decay")
        is_reached = expert.final_weight is None or bool(expert.decay_updates)
        below.require(is_reached, "final_weight", "is what weight comes to within decay_updates, which must be above 0")
