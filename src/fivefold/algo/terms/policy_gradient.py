"""The policy gradient: a surrogate of the ratio to the old policy, weighted by the rollout correction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from fivefold.algo.correction import SECOND_MOMENT, Correction
from fivefold.algo.importance_sampling import RATIOS, Ratio
from fivefold.algo.part import Case, Chosen, Part, chosen_function, usual
from fivefold.algo.segments import Segments
from fivefold.algo.surrogate import Surrogate, UserSurrogate
from fivefold.algo.surrogates import PARAMETERS, SURROGATES, make_surrogate, surrogate_class
from fivefold.algo.term import Progress, Tokens
from fivefold.algo.terms.kl import k3
from fivefold.columns import Column
from fivefold.keys.ranges import NameOrCode
from fivefold.lazy import Tensor, torch
from fivefold.user_code import is_user_code, load_user_code

if TYPE_CHECKING:
    from fivefold.types import TokenBatch

LOGPROB_DIFF_BOUNDS = (0.1, 0.5, 1.0)
"""Bounds in nats; for each one, the share of tokens is recorded whose engine and trainer log-probs differ by more."""


@dataclass(frozen=True)
class SurrogateKeys(Part):
    """Choice of the surrogate and of the ratio that it takes."""

    importance_sampling_level: Annotated[str, NameOrCode(RATIOS)] = usual("token")
    """Level of the ratio to the old policy: token, turn, sequence or sequence-token; or `path.py:function`."""
    surrogate: Annotated[str, NameOrCode(SURROGATES)] = usual("ppo_clip")
    """Per-token objective: one of SURROGATES, or `path.py:function`. Its parameters follow; the surrogate's row has their
    defaults and ranges."""

    @classmethod
    def check(cls, case: Case) -> None:
        chosen, findings, level = case.chosen, case.findings, case.chosen.importance_sampling_level
        surrogate, kind = chosen.surrogate, surrogate_class(chosen.surrogate)
        if case.offline:
            message = f"of {case.name} cannot be changed: choose another method"
            findings.require(case.overrides.surrogate is None, "surrogate", message)
        taken = kind.parameters() if surrogate in SURROGATES else {}
        for key in PARAMETERS:
            value = getattr(chosen, key)
            if value is not None and key in taken:
                if fault := kind.range_of(key).fault(value):
                    findings.error(key, fault)
            elif value is not None:
                users = ", ".join(name for name, other in SURROGATES.items() if key in other.parameters())
                findings.error(key, f"belongs to {users}, not to {surrogate}: leave it out or choose another surrogate")
        kind.check(case)
        if kind.ratio_reference != "old":
            findings.require(
                case.overrides.importance_sampling_level is None,
                "importance_sampling_level",
                f"belongs to methods that compare with the policy before the update: {case.name} does not",
            )
        elif level in RATIOS:
            findings.require(
                level in kind.levels,
                "importance_sampling_level",
                f"must be {' or '.join(kind.levels)} for {surrogate}, which looks at tokens itself: got {level}",
            )
        case.require_turns("importance_sampling_level", level == "turn", ": turn needs turns of trajectories")
        if kind.pairs:
            learners = " or ".join(name for name, method in case.methods.items() if method.learns_from == "pairs")
            message = f": {surrogate} compares pairs in the data: write name: {learners}"
            findings.require(case.methods[case.name].learns_from == "pairs", "surrogate", message)
        unlike = surrogate in ("log_likelihood", "opmd") and chosen.rollout_correction.weight == "none"
        if unlike and case.updates > 1 and not case.offline:
            findings.note(
                f"{case.name} has no ratio to the policy that sampled: all but the first of {case.updates} updates a step "
                "are off-policy; set algorithm.updates_per_step: 1, or a rollout correction"
            )


@dataclass(frozen=True)
class GradientLoss:
    """Loss of the policy gradient on a micro-batch."""

    loss_T: Tensor
    """Loss of each sampled token before loss weights; 0 elsewhere."""
    kept_T: Tensor | None
    """Tokens that the rollout correction keeps in the loss; None without one."""
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyGradient:
    """-correction · surrogate of each token, by the log-probs that the method compares with."""

    surrogate: Surrogate
    level: Ratio
    correction: Correction
    vanishes: bool
    """Whether the surrogate is exactly 0 for a sample with zero advantages, whatever its log-probs are."""

    @classmethod
    def of(cls, chosen: Chosen) -> PolicyGradient:
        """Build it from resolved choices."""
        name, numbers = chosen.surrogate, {key: getattr(chosen, key) for key in PARAMETERS}
        kind = surrogate_class(name)
        if is_user_code(name):
            surrogate: Surrogate = UserSurrogate(load_user_code(name))
        else:
            surrogate = make_surrogate(name, **{key: numbers[key] for key in kind.parameters()})
        functions = (chosen.advantage, chosen.importance_sampling_level, chosen.rollout_correction.weight)
        return cls(
            surrogate,
            chosen_function(chosen.importance_sampling_level, RATIOS.__getitem__),
            Correction.of(chosen),
            kind.vanishes and not any(map(is_user_code, functions)) and not any(numbers[key] for key in kind.unless),
        )

    @property
    def selects(self) -> bool:
        """Whether some tokens are treated differently, selected among all tokens of an update."""
        return self.surrogate.selects or self.correction.second_moment is not None

    def needs(self, updates: int) -> frozenset[Column]:
        """Return the columns that must be filled in. A single update on fresh samples computes its old log-probs itself."""
        reference, source = self.surrogate.ratio_reference, self.correction.old_logprobs_from
        compares = (reference == "old" or self.correction.is_active) and source == "trainer"
        selects = (self.surrogate.selects and source != "engine") or self.correction.second_moment is not None
        wanted = {
            Column.OLD_LOGPROBS: selects or (updates > 1 and compares),
            Column.REF_LOGPROBS: reference == "reference",
            Column.INTERPOLATION: source == "loglinear",
        }
        return frozenset(column for column, needed in wanted.items() if needed)

    def old_logprobs(self, logprobs_T: Tensor, batch: TokenBatch) -> Tensor:
        """Return the log-probs that the ratio compares with."""
        if self.surrogate.ratio_reference == "reference":
            return batch[Column.REF_LOGPROBS]
        if self.correction.old_logprobs_from == "engine":
            return batch[Column.ROLLOUT_LOGPROBS]
        if self.correction.old_logprobs_from == "loglinear":
            return torch.lerp(batch[Column.ROLLOUT_LOGPROBS], logprobs_T.detach(), batch[Column.INTERPOLATION])
        # With one update on fresh samples, the current log-probs are those before the update.
        return batch.columns.get(Column.OLD_LOGPROBS, logprobs_T.detach())

    def first_correction(self, batch: TokenBatch) -> tuple[Tensor, Tensor] | None:
        """(weight_T, kept_T) of the rollout correction in the first update on each sample; None without a correction.

        It excludes the rejection by `second_moment`, which is decided over all tokens of an update.
        """
        now_T = batch.columns.get(Column.OLD_LOGPROBS, batch.columns.get(Column.FIRST_LOGPROBS))
        if not self.correction.is_active or Column.ROLLOUT_LOGPROBS not in batch or now_T is None:
            return None
        bounds = {name: bound for name, bound in self.correction.reject_divergence.items() if name != SECOND_MOMENT}
        mask_T = batch.loss_mask_T if Column.EXPERT not in batch else batch.loss_mask_T & ~batch[Column.EXPERT]
        before_T = now_T if self.correction.old_logprobs_from == "engine" else self.old_logprobs(now_T, batch)
        correction = replace(self.correction, reject_divergence=bounds)
        return correction((before_T - batch[Column.ROLLOUT_LOGPROBS]) * mask_T, Segments.of(batch))

    def tokens(self, logprobs_T: Tensor, entropy_T: Tensor, batch: TokenBatch, progress: Progress) -> Tokens:
        """Return what the terms of the loss read of a micro-batch."""
        samples, old_T = Segments.of(batch), self.old_logprobs(logprobs_T, batch)
        return Tokens(batch, samples, logprobs_T, entropy_T, old_T, self.level(logprobs_T, old_T, samples), progress)

    def __call__(self, tokens: Tokens) -> GradientLoss:
        """Return the loss of each token and its metrics."""
        batch, samples, log_ratio_T = tokens.batch, tokens.samples, tokens.log_ratio_T
        advantages_T, now_T = batch[Column.ADVANTAGES], tokens.logprobs_T.detach()
        objective_T = self.surrogate(log_ratio_T, tokens.logprobs_T, advantages_T, samples)
        sums, maxima, kept_T = {"policy/logprob_mean": tokens.mean(now_T)}, {}, None
        reported = self.surrogate.metrics(log_ratio_T.detach(), advantages_T, samples)
        share_T = batch.weights_T if self.surrogate.ratio_reference == "reference" else tokens.share_T
        sums |= {name: (value_T * share_T).sum() for name, value_T in reported.items()}
        if self.surrogate.ratio_reference == "old":
            ratio_T = log_ratio_T.detach().clamp(-20, 20).exp()
            sums["policy/ratio_mean"] = tokens.mean(ratio_T)
            # Samples come from the old policy, so k3 of (old, now) estimates KL(old || now).
            sums["policy/kl_old"] = tokens.mean(k3(tokens.old_T, now_T))
            maxima["policy/ratio_max"] = _largest(ratio_T * tokens.sampled_T)
        if Column.ROLLOUT_LOGPROBS in batch:
            before_T = batch.columns.get(Column.OLD_LOGPROBS, now_T)
            size_T = ((before_T - batch[Column.ROLLOUT_LOGPROBS]) * tokens.sampled_T).abs()
            sums["rollout/logprob_diff_mean"] = tokens.mean(size_T)
            for bound in LOGPROB_DIFF_BOUNDS:
                sums[f"rollout/logprob_diff_over_{bound:g}"] = tokens.mean(size_T > bound)
            sums["rollout/kl"] = tokens.mean(k3(batch[Column.ROLLOUT_LOGPROBS], before_T))
            maxima["rollout/logprob_diff_max"] = _largest(size_T)
            if self.correction.is_active:
                if self.correction.old_logprobs_from != "trainer":
                    # No trainer log-probs lie between the engine's and the current ones, so rejection compares these two.
                    before_T = now_T if self.correction.old_logprobs_from == "engine" else tokens.old_T
                difference_T = (before_T - batch[Column.ROLLOUT_LOGPROBS]) * tokens.sampled_T
                weight_T, kept_T = self.correction(difference_T, samples)
                objective_T = objective_T * weight_T
                corrected = self.correction.metrics(difference_T, weight_T, kept_T, samples)
                sums |= {name: tokens.mean(value_T) for name, value_T in corrected.items()}
                maxima["rollout_correction/ratio_max"] = _largest(
                    corrected["rollout_correction/ratio_mean"] * tokens.sampled_T
                )
        if Column.EXPERT in batch:
            objective_T = torch.where(batch[Column.EXPERT], 0.0, objective_T)
        return GradientLoss(-objective_T, kept_T, sums, maxima)


def _largest(values_T: Tensor) -> Tensor:
    return values_T.max() if len(values_T) else values_T.sum()
