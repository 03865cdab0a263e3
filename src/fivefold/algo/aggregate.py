"""Response lengths of one update -> the weight of each sample's tokens, so that the loss is a plain sum.

The denominators cover the whole update over all replicas, so the split into micro-batches or ranks does not change the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from fivefold.algo.part import Case, Part, chosen_function, usual
from fivefold.keys.ranges import NameOrCode
from fivefold.lazy import Tensor, torch

Aggregate = Callable[["Tensor", int], "Tensor"]
"""response_lengths_N of the whole update, max_response_tokens -> weight_N of every token of the sample."""
LEGACY_AGGREGATE = "micro-batch-token-mean"


def token_mean(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Σ l / Σ tokens: every token has the same weight (DAPO, 2503.14476 equation 8)."""
    lengths_N = response_lengths_N.double()
    return torch.full_like(lengths_N, 1.0) / lengths_N.sum().clamp(min=1)


def seq_mean_token_mean(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over samples of the mean over their tokens (GRPO, 2402.03300 equation 3)."""
    lengths_N = response_lengths_N.double()
    return 1.0 / (lengths_N.clamp(min=1) * max(len(lengths_N), 1))


def seq_mean_token_sum(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over samples of Σ over their tokens: the likelihood of a response as a whole (RLOO, 2402.14740)."""
    return torch.full_like(response_lengths_N.double(), 1.0 / max(len(response_lengths_N), 1))


def constant_length(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over samples of Σ l / longest response allowed (Dr. GRPO, 2503.20783 section 3.2)."""
    lengths_N = response_lengths_N.double()
    return torch.full_like(lengths_N, 1.0 / (max_response_tokens * max(len(lengths_N), 1)))


def micro_batch_token_mean(response_lengths_N: Tensor, max_response_tokens: int) -> Tensor:
    """Mean over micro-batches of Σ l / tokens of the micro-batch. The micro-batch divides by its tokens, so the weight here
    is 1.

    A token's weight then depends on the split into micro-batches. Use it only to reproduce verl's older actor or siiRL.
    """
    return torch.ones_like(response_lengths_N.double())


AGGREGATES: dict[str, Aggregate] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "constant-length": constant_length,
    LEGACY_AGGREGATE: micro_batch_token_mean,
}


def aggregate_of(name: str) -> Aggregate:
    """Return the aggregation of a name or of `path.py:function`."""
    return chosen_function(name, AGGREGATES.__getitem__)


def weights_of(aggregate: Aggregate, lengths_N: Tensor, max_response_tokens: int, kept_N: Tensor | None) -> Tensor:
    """[N] aggregation weights of the samples that are kept, 0 for the others."""
    if kept_N is None:
        return aggregate(lengths_N, max_response_tokens)
    weights_N = torch.zeros(len(lengths_N), dtype=torch.float64)
    weights_N[kept_N] = aggregate(lengths_N[kept_N], max_response_tokens)
    return weights_N


@dataclass(frozen=True)
class Aggregation(Part):
    """Weights of tokens in the loss, and in its KL and entropy terms."""

    aggregate: Annotated[str, NameOrCode(AGGREGATES)] = usual("token-mean")
    """Weighting of tokens in the loss: one of AGGREGATES, or `path.py:function`."""
    penalty_aggregate: Annotated[str, NameOrCode(AGGREGATES)] | None = None
    """Aggregation for the KL and entropy terms; `aggregate` if left out."""
    value_aggregate: Annotated[str, NameOrCode(AGGREGATES)] | None = None
    """Aggregation for the critic's loss; `aggregate` if left out."""

    @cached_property
    def of_policy(self) -> Aggregate:
        return aggregate_of(self.aggregate)

    @cached_property
    def of_penalties(self) -> Aggregate:
        return aggregate_of(self.penalty_aggregate or self.aggregate)

    @cached_property
    def of_values(self) -> Aggregate | None:
        """The aggregation of the critic's loss; None if it is that of the policy's."""
        return None if self.value_aggregate is None else aggregate_of(self.value_aggregate)

    @property
    def has_own_penalties(self) -> bool:
        """Whether penalties have other weights than the surrogate."""
        return self.penalty_aggregate not in (None, self.aggregate)

    @property
    def per_micro_batch(self) -> bool:
        """Whether tokens are averaged per micro-batch instead of per update: the legacy aggregation."""
        return self.aggregate == LEGACY_AGGREGATE

    @classmethod
    def check(cls, case: Case) -> None:
        chosen, findings = case.chosen, case.findings
        method = case.methods[case.name]
        if method.learns_from == "pairs":
            message = f"must be {method.aggregate} for {case.name}: every pair counts alike"
            findings.require(case.overrides.aggregate in (None, method.aggregate), "aggregate", message)
        if case.overrides.value_aggregate is not None:
            if chosen.credit != "gae":
                findings.ignore("value_aggregate", "there is no critic")
            findings.require(
                chosen.value_aggregate != LEGACY_AGGREGATE,
                "value_aggregate",
                f": {LEGACY_AGGREGATE} needs the same algorithm.aggregate: got {chosen.aggregate}",
            )
        if case.overrides.penalty_aggregate is None:
            return
        if not (chosen.kl.coef and chosen.kl.place == "loss") and not chosen.entropy_coef:
            findings.ignore("penalty_aggregate", "there is neither KL nor entropy in the loss")
        findings.require(
            LEGACY_AGGREGATE not in {chosen.aggregate, chosen.penalty_aggregate}
            or chosen.aggregate == chosen.penalty_aggregate,
            "penalty_aggregate",
            f": {LEGACY_AGGREGATE} is for all of the loss or none of it: got {chosen.penalty_aggregate} with "
            f"{chosen.aggregate}",
        )
