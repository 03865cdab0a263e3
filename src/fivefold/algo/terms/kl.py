"""Penalty on the distance to the reference: logprobs, ref_logprobs -> estimate of KL(policy || reference) at each token.

Estimators: Schulman, "Approximating KL Divergence".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from fivefold.algo.part import Case, chosen_function, usual
from fivefold.algo.surrogate import ratio
from fivefold.algo.surrogates import surrogate_class
from fivefold.algo.term import Progress, Term, Tokens
from fivefold.columns import Column
from fivefold.keys.ranges import NameOrCode, above, at_least
from fivefold.lazy import Tensor

if TYPE_CHECKING:
    from fivefold.types import TokenBatch

Estimator = Callable[["Tensor", "Tensor"], "Tensor"]


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """log π - log π_ref: unbiased, can be negative."""
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Half the squared log-ratio; its gradient is that of the KL."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """e^-d + d - 1 with d = log π - log π_ref: unbiased and never negative (GRPO, 2402.03300 equation 4).

    d is clamped to ±20, so that the exponential stays finite; the penalty is already extreme there.
    """
    log_ratio_T = (logprobs_T - ref_logprobs_T).clamp(-20, 20)
    return (-log_ratio_T).expm1() + log_ratio_T


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """|log π - log π_ref|: a distance that some systems offer, not an estimate of the KL."""
    return (logprobs_T - ref_logprobs_T).abs()


def straight_through(value: Estimator) -> Estimator:
    """Return an estimator with the value of `value` and the gradient of k2, which is that of the KL; k1's would be 0 on
    average."""

    def estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
        gradient_T = k2(logprobs_T, ref_logprobs_T)
        return gradient_T - gradient_T.detach() + value(logprobs_T, ref_logprobs_T).detach()

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
    "abs+": straight_through(absolute),
}


@dataclass(frozen=True)
class KL(Term):
    """A penalty on the distance to the reference; each choice that is left out is the method's."""

    section = "kl"
    reports = (
        ("policy/kl_reference", "nats", "KL(policy || reference), k3, whatever estimator the loss uses."),
        ("policy/kl_coef", "factor", "KL coefficient of the step, where kl.target moves it."),
    )
    estimator: Annotated[str, NameOrCode(ESTIMATORS)] = usual("k3")
    """Estimator of the KL: k1, k2, k3 or abs, or `path.py:function`. A trailing + keeps the value but uses the gradient of
    k2."""
    coef: Annotated[float, at_least(0)] = usual(0.0)
    """Weight of the penalty; 0 turns it off."""
    place: Literal["loss", "reward"] = usual("loss")
    """Place of the penalty: in the loss of each token, or subtracted from the reward before advantages are computed."""
    target: Annotated[float, above(0)] | None = None
    """Target for the KL: the coefficient adapts to reach it. The coefficient is fixed if left out."""
    horizon: Annotated[int, above(0)] = usual(10000)
    """Number of samples over which the coefficient changes by about the relative distance to the target."""
    ratio_weighted: bool = usual(False)
    """Multiply the penalty of a token by π / π_old: samples of the old policy then give an unbiased estimate of the new
    policy's KL (DeepSeek-V3.2, 2512.02556)."""
    reward_coef: Annotated[float, at_least(0)] = usual(0.0)
    """Weight of a second penalty, subtracted from the reward in addition to the one in the loss; 0 (none) if left out."""
    reward_estimator: Annotated[str, NameOrCode(ESTIMATORS)] = usual("k1")
    """Estimator of the second penalty (`reward_coef`): k1 (if left out), k2, k3, abs, or `path.py:function`."""

    @cached_property
    def estimate(self) -> Estimator:
        return chosen_function(self.estimator, ESTIMATORS.__getitem__)

    @cached_property
    def estimate_in_reward(self) -> Estimator:
        """Estimator of the penalty that is subtracted from the reward."""
        name = self.estimator if self.coef and self.place == "reward" else self.reward_estimator
        return chosen_function(name, ESTIMATORS.__getitem__)

    @property
    def is_active(self) -> bool:
        return bool(self.coef) and self.place == "loss"

    @property
    def is_in_reward(self) -> bool:
        """Whether a penalty is subtracted from the reward."""
        return bool(self.coef and self.place == "reward") or bool(self.reward_coef)

    def needs(self, updates: int) -> frozenset[Column]:
        wanted = {Column.REF_LOGPROBS: self.coef or self.reward_coef, Column.OLD_LOGPROBS: self.is_in_reward}
        return frozenset(column for column, needed in wanted.items() if needed)

    def reward_penalty(self, old_T: Tensor, batch: TokenBatch, progress: Progress) -> Tensor:
        """[T] penalty that is subtracted from the reward of each token; `old_T` are log-probs before the step's updates."""
        coef = self._coef(progress) if self.coef and self.place == "reward" else self.reward_coef
        return coef * self.estimate_in_reward(old_T, batch[Column.REF_LOGPROBS]) * batch.loss_mask_T

    def loss(self, tokens: Tokens) -> Tensor:
        kl_T = self._coef(tokens.progress) * self.estimate(tokens.logprobs_T, tokens.batch[Column.REF_LOGPROBS])
        return kl_T * ratio(tokens.log_ratio_T) if self.ratio_weighted else kl_T

    def metrics(self, tokens: Tokens) -> dict[str, Tensor]:
        if Column.REF_LOGPROBS not in tokens.batch:
            return {}
        return {"policy/kl_reference": tokens.mean(k3(tokens.logprobs_T.detach(), tokens.batch[Column.REF_LOGPROBS]))}

    def _coef(self, progress: Progress) -> float:
        return self.coef if progress.kl_coef is None else progress.kl_coef

    def adapted(self, coef: float, kl_reference: float, samples: int) -> float:
        """Return the coefficient for the next step, coef · (1 + clip(KL / target - 1, ±0.2) · samples / horizon): 1909.08593
        section 2.2.

        Without a target it stays. A KL that is not finite is ignored: no update of the step was taken.
        """
        if self.target is None or not math.isfinite(kl_reference):
            return coef
        return coef * (1 + min(max(kl_reference / self.target - 1, -0.2), 0.2) * samples / self.horizon)

    @classmethod
    def check(cls, case: Case) -> None:
        kl, overrides, findings = case.chosen.kl, case.overrides.kl, case.findings
        kind = surrogate_class(case.chosen.surrogate)
        if case.offline:
            message = f": reward has nothing to act on: {case.name} has no rewards"
            findings.require(overrides.place != "reward", "kl.place", message)
            findings.require(
                not overrides.reward_coef, "kl.reward_coef", f"has nothing to act on: {case.name} does not sample"
            )
        if case.offline and kind.ratio_reference == "reference":
            message = f": {case.name} has the reference in its loss already, weighted by beta"
            findings.require(not overrides.coef, "kl.coef", message)
        for key, is_used in (("estimator", kl.place == "reward"), ("reward_estimator", kl.reward_coef)):
            name = str(getattr(kl, key))
            findings.require(
                not is_used or not name.endswith("+"),
                f"kl.{key}",
                f": {name} changes the gradient, which a reward has not: write {name.removesuffix('+')}",
            )
        findings.require(
            not kl.reward_coef or (kl.place == "loss" and bool(kl.coef)),
            "kl.reward_coef",
            f"is a second penalty next to the one in the loss: with kl.place {kl.place} and kl.coef {kl.coef:g} write "
            "kl: {place: reward, coef: ...}",
        )
        if overrides.reward_estimator is not None and not kl.reward_coef:
            findings.ignore("kl.reward_estimator", "kl.reward_coef is 0")
        if kl.ratio_weighted:
            findings.require(kl.place == "loss", "kl.ratio_weighted", f"belongs to place: loss: got {kl.place}")
            findings.require(
                kind.ratio_reference == "old",
                "kl.ratio_weighted",
                f"is the ratio to the old policy, with which {case.chosen.surrogate} does not compare",
            )
        if kl.target is not None:
            findings.require(bool(kl.coef), "kl.target", "moves kl.coef, which must start above 0")
        unused = any((overrides.estimator, overrides.place, overrides.target, overrides.horizon, overrides.ratio_weighted))
        if unused and not kl.coef:
            findings.ignore("kl", "its coef is 0")
        if overrides.horizon is not None and kl.target is None:
            findings.ignore("kl.horizon", "without kl.target the coefficient is fixed")
