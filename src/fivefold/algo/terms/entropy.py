"""Entropy bonus: a policy that stays uncertain keeps exploring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fivefold.algo.part import usual
from fivefold.algo.term import Term, Tokens
from fivefold.keys.ranges import within
from fivefold.lazy import Tensor


@dataclass(frozen=True)
class Entropy(Term):
    """-coef · H of the policy's distribution at each token."""

    reports = (("policy/entropy", "nats", "Entropy of the next-token distribution, mean over response tokens."),)
    entropy_coef: Annotated[float, within("[-1000, 1000]")] = usual(0.0)
    """Weight of the entropy bonus."""

    @property
    def is_active(self) -> bool:
        return self.entropy_coef != 0

    def loss(self, tokens: Tokens) -> Tensor:
        return -self.entropy_coef * tokens.entropy_T

    def metrics(self, tokens: Tokens) -> dict[str, Tensor]:
        return {"policy/entropy": tokens.mean(tokens.entropy_T.detach())}
