"""An objective is one choice on each axis: Choices -> advantages, weights and the loss of an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from fivefold.algo import kl
from fivefold.algo.advantages import Advantage, AdvantageInputs, make_advantage
from fivefold.algo.aggregate import AGGREGATES, Aggregate
from fivefold.algo.correction import Correction
from fivefold.algo.credit import Credit, UserCredit, make_credit, optimal_token_baseline, whiten
from fivefold.algo.imitation import Imitation
from fivefold.algo.importance_sampling import RATIOS, Ratio
from fivefold.algo.process_reward import ProcessReward
from fivefold.algo.reward_shaping import overlong_penalty
from fivefold.algo.segments import Segments
from fivefold.algo.surrogates import Surrogate, TokenSelector, UserSurrogate, make_surrogate, ratio
from fivefold.config import methods
from fivefold.config.findings import Findings
from fivefold.config.method_rules import check_method
from fivefold.config.methods import SECOND_MOMENT, Choices, ExpertConfig, ProcessRewardConfig, RatioReference
from fivefold.config.ranges import check_values
from fivefold.types import LossOutput, RolloutStats, TokenBatch
from fivefold.user_code import is_user_code, load_user_code

LOGPROB_DIFF_BOUNDS = (0.1, 0.5, 1.0)
"""Bounds in nats; for each one, the share of tokens is recorded whose engine and trainer log-probs differ by more."""


class Replicas(Protocol):
    """Reduces numbers over the data-parallel replicas of a step."""

    def all_reduce_sum(self, sums: Tensor) -> Tensor:
        """Return the sum over replicas."""
        ...

    def all_reduce_max(self, number: float) -> float:
        """Return the maximum over replicas."""
        ...


@dataclass
class Objective:
    """Maximized objective: Σ weights · correction · surrogate + Σ penalty_weights · (entropy_coef · H - kl_coef · KL)."""

    advantage: Advantage
    surrogate: Surrogate
    credit: Credit
    importance_sampling_level: Ratio
    aggregate: Aggregate
    penalty_aggregate: Aggregate
    """Aggregation of the KL and entropy terms."""
    kl_estimator: kl.Estimator
    rollout_correction: Correction
    ratio_reference: RatioReference = "old"
    """Log-probs that the surrogate's ratio compares with."""
    per_micro_batch: bool = False
    """Whether tokens are averaged per micro-batch instead of per update: the legacy aggregation."""
    kl_coef: float = 0.0
    kl_in_reward: bool = False
    kl_target: float | None = None
    kl_horizon: int = 10000
    kl_ratio_weighted: bool = False
    """Whether the KL penalty of a token is multiplied by its ratio to the old policy."""
    kl_reward_coef: float = 0.0
    """Coefficient of a second KL penalty, in the reward, next to the one in the loss."""
    kl_reward_estimator: kl.Estimator = kl.ESTIMATORS["k1"]
    entropy_coef: float = 0.0
    token_baseline: bool = False
    whiten: bool = False
    whiten_by: Literal["step", "domain", "group"] = "step"
    advantage_clip: float | None = None
    reward_shift: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    overlong_buffer: float = 0.0
    overlong_penalty: float = 1.0
    overlong_filter: bool = False
    overlong_zero: bool = False
    difficulty_low: float | None = None
    difficulty_high: float | None = None
    difficulty_by: Literal["reward", "correct", "spread"] = "reward"
    old_logprobs_from: Literal["trainer", "engine", "loglinear"] = "trainer"
    """Source of the old log-probs. loglinear: interpolated by token age between the engine's and the current ones."""
    needs_greedy: bool = False
    """Whether the advantage compares with the most likely response to the prompt."""
    vanishes: bool = False
    """Whether the surrogate is exactly 0 for a sample with zero advantages, whatever its log-probs are."""
    imitation: Imitation | None = None
    """Objective term for expert responses among those of the step; None without an expert."""
    process: ProcessReward | None = None
    """Token rewards from a process reward model that learns with the policy; None without one."""
    step: int = 0
    """Step in progress, from 0; the expert's share depends on it."""

    @classmethod
    def of(cls, chosen: Choices) -> Objective:
        """Build the objective from resolved choices."""
        correction = chosen.rollout_correction
        kinds = {item.name: getattr(correction, item.name) for item in fields(Correction)}
        kinds["weight"] = _choose(str(correction.weight), str)
        as_they_are = {item.name for item in fields(Choices)} & {item.name for item in fields(cls)}
        as_they_are -= {"advantage", "surrogate", "credit", "importance_sampling_level", "rollout_correction"}
        as_they_are -= {"aggregate", "penalty_aggregate"}
        return cls(
            advantage=_choose(str(chosen.advantage), lambda name: _advantage(name, chosen)),
            surrogate=_surrogate(chosen),
            credit=_credit(chosen),
            importance_sampling_level=_choose(str(chosen.importance_sampling_level), RATIOS.__getitem__),
            aggregate=_choose(str(chosen.aggregate), AGGREGATES.__getitem__),
            penalty_aggregate=_choose(str(chosen.penalty_aggregate), AGGREGATES.__getitem__),
            kl_estimator=_choose(str(chosen.kl.estimator), kl.ESTIMATORS.__getitem__),
            rollout_correction=Correction(**kinds),
            ratio_reference=methods.surrogate_row(str(chosen.surrogate)).ratio_reference,
            per_micro_batch=chosen.aggregate == methods.LEGACY_AGGREGATE,
            kl_in_reward=chosen.kl.place == "reward",
            kl_reward_estimator=_choose(str(chosen.kl.reward_estimator), kl.ESTIMATORS.__getitem__),
            old_logprobs_from=correction.old_logprobs_from or "trainer",
            needs_greedy=chosen.advantage == "greedy_baseline",
            vanishes=methods.vanishes(chosen),
            imitation=_imitation(chosen.expert),
            process=_process(chosen.process_reward),
            **{
                f"kl_{name}": getattr(chosen.kl, name)
                for name in ("coef", "target", "horizon", "ratio_weighted", "reward_coef")
            },
            **{name: getattr(chosen, name) for name in as_they_are},
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0 or self.kl_reward_coef != 0 or self.ratio_reference == "reference"

    @property
    def reward_penalty(self) -> tuple[float, kl.Estimator] | None:
        """Coefficient and estimator of the KL that is subtracted from the reward; None without one."""
        if self.kl_coef and self.kl_in_reward:
            return self.kl_coef, self.kl_estimator
        return (self.kl_reward_coef, self.kl_reward_estimator) if self.kl_reward_coef else None

    @property
    def needs_critic(self) -> bool:
        return self.credit.needs_critic

    @property
    def needs_prm(self) -> bool:
        return self.process is not None

    @property
    def token_selector(self) -> TokenSelector | None:
        """The surrogate if it selects tokens among all tokens of the update, otherwise None."""
        return cast(TokenSelector, self.surrogate) if hasattr(self.surrogate, "select_tokens") else None

    def needs_old_logprobs(self, updates: int) -> bool:
        """Whether log-probs are needed before the first update. A single update on fresh samples computes them itself."""
        if self.reward_penalty is not None or self.token_baseline:
            return True
        if self.token_selector is not None and self.old_logprobs_from != "engine":
            return True
        if self.rollout_correction.second_moment is not None:
            return True
        compares = self.ratio_reference == "old" or self.rollout_correction.is_active
        return updates > 1 and compares and self.old_logprobs_from == "trainer"

    def needs(self, updates: int) -> frozenset[str]:
        """Return the batch fields that must be filled in before `updates` optimizer steps on it."""
        wanted = {
            "old_logprobs_T": self.needs_old_logprobs(updates),
            "half_temperature_logprobs_T": self.token_baseline,
            "ref_logprobs_T": self.needs_reference,
            "values_T": self.needs_critic,
            "prm_ref_logprobs_T": self.needs_prm,
            "interpolation_T": self.old_logprobs_from == "loglinear",
        }
        return frozenset(name for name, needed in wanted.items() if needed)

    # --- before the updates ------------------------------------------------------------------------------------------

    def shape_rewards(self, rewards_N: Tensor, lengths_N: Tensor, max_response_tokens: int) -> Tensor:
        """Apply to the rewards, in this order: overlong penalty, shift, scale, clipping."""
        if self.overlong_buffer:
            share = self.overlong_buffer < 1
            buffer = self.overlong_buffer * max_response_tokens if share else self.overlong_buffer
            rewards_N = rewards_N + overlong_penalty(lengths_N, max_response_tokens, buffer, self.overlong_penalty)
        if self.reward_shift or self.reward_scale != 1:
            rewards_N = (rewards_N + self.reward_shift) * self.reward_scale
        if self.reward_clip is not None:
            rewards_N = rewards_N.clamp(-self.reward_clip, self.reward_clip)
        return rewards_N

    def assign_advantages(self, batch: TokenBatch, stats: RolloutStats, replicas: Replicas) -> None:
        """Set `advantages_T` and `returns_T` of this replica's batch from the rewards of the whole step. Collective."""
        inputs, kept_N = self._inputs(stats), self._whitened(stats)
        part_N = None
        if self.whiten_by != "step":
            part_N = stats.domain_N if self.whiten_by == "domain" else stats.group_N
        batch.advantages_T, batch.returns_T = self.advantages(batch, inputs, stats.finished_N, replicas, kept_N, part_N)
        # Not used after this point.
        batch.half_temperature_logprobs_T = None

    def _inputs(self, stats: RolloutStats) -> AdvantageInputs:
        limit, greedy_N = stats.max_response_tokens, stats.greedy_rewards_N
        return AdvantageInputs(
            rewards_N=self.shape_rewards(stats.rewards_N, stats.response_lengths_N, limit),
            group_N=stats.group_N,
            lengths_N=stats.response_lengths_N,
            truncated_N=~stats.finished_N,
            greedy_rewards_N=None if greedy_N is None else self.shape_rewards(greedy_N, stats.greedy_lengths_N, limit),
            expert_N=stats.expert_N,
        )

    def _compared(self, inputs: AdvantageInputs) -> Tensor:
        """[N] advantages of the sampled responses, compared among themselves; 1 for an expert's response."""
        if (expert_N := inputs.expert_N) is not None:
            found_N = torch.ones(len(expert_N), dtype=torch.float64)
            found_N[~expert_N] = self.advantage(inputs.select(~expert_N)).double()
        else:
            found_N = self.advantage(inputs)
        if self.overlong_zero:
            assert inputs.truncated_N is not None
            without_N = inputs.truncated_N & (inputs.rewards_N == 0)
            found_N = torch.where(without_N if expert_N is None else without_N & ~expert_N, 0.0, found_N)
        return found_N

    def kept(self, stats: RolloutStats) -> Tensor | None:
        """[N] samples that carry loss, by truncation and prompt difficulty; None if all do."""
        kept_N = None
        if self.overlong_filter:
            kept_N = stats.finished_N
        if self.difficulty_low is not None or self.difficulty_high is not None:
            judged_N = self._difficulty(stats)
            low = -math.inf if self.difficulty_low is None else self.difficulty_low
            high = math.inf if self.difficulty_high is None else self.difficulty_high
            fair_N = (judged_N > low) & (judged_N < high)
            kept_N = fair_N if kept_N is None else kept_N & fair_N
        return kept_N if kept_N is None or stats.expert_N is None else kept_N | stats.expert_N

    def _whitened(self, stats: RolloutStats) -> Tensor | None:
        """[N] samples over whose tokens advantages are whitened: those that carry loss, and those filtered by spread."""
        return replace(self, difficulty_low=None, difficulty_high=None).kept(stats) if self._is_late else self.kept(stats)

    @property
    def _is_late(self) -> bool:
        """Whether prompts are filtered after advantages are computed: AReaL's actor.dynamic_sampling."""
        return self.difficulty_by == "spread"

    def _difficulty(self, stats: RolloutStats) -> Tensor:
        """[N] difficulty statistic of each sample's prompt."""
        if self._is_late:
            inputs = self._inputs(stats)
            return inputs.group_extremes("amax") - inputs.group_extremes("amin")
        inputs = AdvantageInputs(stats.rewards_N, stats.group_N, stats.response_lengths_N)
        judged_N = stats.rewards_N if self.difficulty_by == "reward" else stats.correct_N.double()
        return inputs.group_sums(judged_N) / inputs.count_N

    def skipped(self, stats: RolloutStats) -> Tensor | None:
        """[N] samples that add exactly nothing to the loss and its gradient, as far as the step's rewards determine that.

        Such samples carry no loss, or have zero advantage where the loss is only the surrogate. None if every sample
        influences the terms of others, so that none can be skipped.
        """
        selects = self.token_selector is not None or self.rollout_correction.second_moment is not None
        in_reward, moves = self.reward_penalty is not None, self.kl_target is not None
        if not self.vanishes or selects or self.per_micro_batch or in_reward or moves or self.needs_prm:
            return None
        kept_N = self._whitened(stats) if self.whiten else self.kept(stats)
        skipped_N = torch.zeros(len(stats), dtype=torch.bool) if kept_N is None else ~kept_N
        compares = self.whiten or self.token_baseline
        if not self.kl_coef and not self.entropy_coef and not compares and self.credit.keeps_zero:
            skipped_N = skipped_N | (self._compared(self._inputs(stats)) == 0)
        return skipped_N

    def advantages(
        self,
        batch: TokenBatch,
        inputs: AdvantageInputs,
        finished_N: Tensor,
        replicas: Replicas,
        kept_N: Tensor | None = None,
        part_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(advantages_T, returns_T) of this replica's tokens, 0 outside of responses.

        `inputs`, `finished_N` (the response ended by itself), `kept_N` (it carries loss) and `part_N` cover the whole step.
        `part_N` numbers, from 0, the parts that are whitened separately.
        """
        segments, own_N = Segments.of(batch), batch.sample_index_N
        penalties_T = torch.zeros(len(batch.token_ids_T))
        if (penalty := self.reward_penalty) is not None:
            coef, estimator = penalty
            old_T = batch.old_logprobs_T if self.old_logprobs_from == "trainer" else batch.rollout_logprobs_T
            assert old_T is not None and batch.ref_logprobs_T is not None
            penalties_T = coef * estimator(old_T, batch.ref_logprobs_T) * batch.loss_mask_T
            if not self.credit.by_token:
                # Each sample is on exactly one replica, so the sum over replicas is the penalty of each sample.
                penalties_N = torch.zeros(len(inputs.rewards_N), dtype=torch.float64)
                penalties_N[own_N] = segments.sums(penalties_T).double()
                inputs = replace(inputs, rewards_N=inputs.rewards_N - replicas.all_reduce_sum(penalties_N))
        advantages_N = self._compared(inputs)[own_N]
        if self.process is not None:
            rewards_T = self.process.rewards(batch, replicas.all_reduce_max)
            gains_T = self.process.advantages(batch, inputs.group_N, rewards_T, replicas.all_reduce_sum)
            advantages_N, penalties_T = self.process.outcome_coef * advantages_N, penalties_T - gains_T
        advantages_T, returns_T = self.credit(advantages_N, penalties_T, batch.values_T, finished_N[own_N], segments)
        if self.token_baseline:
            longest_G = torch.zeros(int(inputs.group_N.max()) + 1 if len(inputs.group_N) else 0, dtype=torch.long)
            longest_G = longest_G.scatter_reduce(0, inputs.group_N, inputs.lengths_N.long(), "amax")
            squares_T, group_N = self._squared_scores(batch, segments), inputs.group_N[own_N]
            advantages_T = advantages_T - optimal_token_baseline(
                returns_T, squares_T, segments, group_N, longest_G, replicas.all_reduce_sum
            )
        if self.whiten:
            counted_T = batch.loss_mask_T
            if kept_N is not None:
                counted_T = counted_T & kept_N[own_N][segments.sample_T]
            part_T = None if part_N is None else part_N[own_N][segments.sample_T]
            parts = 1 if part_N is None else int(part_N.max()) + 1
            advantages_T = whiten(advantages_T, counted_T, replicas.all_reduce_sum, part_T, parts)
        if self.advantage_clip is not None:
            advantages_T = advantages_T.clamp(-self.advantage_clip, self.advantage_clip)
        return advantages_T, returns_T

    def _squared_scores(self, batch: TokenBatch, samples: Segments) -> Tensor:
        """[T] |e - π|² = 1 - 2π + Σπ² of each token under the old policy: the squared norm of its gradient with respect to
        the logits. It is multiplied by the square of the token's correction weight."""
        old_T, half_T = batch.old_logprobs_T, batch.half_temperature_logprobs_T
        assert old_T is not None and half_T is not None
        # With Z(τ) = Σ e^(z/τ), 2 log π(τ) - log π(τ/2) of a token is log Z(τ/2) - 2 log Z(τ), which is log Σ π(τ)².
        squares_T = (1 - 2 * old_T.exp() + (2 * old_T - half_T).exp()).clamp(min=0)
        if batch.rollout_logprobs_T is not None and self.rollout_correction.is_active:
            weight_T, _ = self.rollout_correction((old_T - batch.rollout_logprobs_T) * batch.loss_mask_T, samples)
            squares_T = squares_T * weight_T.square()
        return squares_T

    def loss_weights(
        self,
        response_lengths_N: Tensor,
        max_response_tokens: int,
        kept_N: Tensor | None = None,
        expert_N: Tensor | None = None,
        update: int = 1,
    ) -> Tensor:
        """[N] weight of each sample's tokens in the loss of one update; 0 for samples that are not kept.

        `update` counts the optimizer steps of the run from 1.
        """
        if expert_N is None:
            return _weights(self.aggregate, response_lengths_N, max_response_tokens, kept_N)
        assert self.imitation is not None
        share, sampled_N = self.imitation.share(update), ~expert_N if kept_N is None else kept_N & ~expert_N
        weights_N = (1 - share) * _weights(self.aggregate, response_lengths_N, max_response_tokens, sampled_N)
        return weights_N + share * _weights(self.imitation.aggregate, response_lengths_N, max_response_tokens, expert_N)

    def penalty_weights(
        self,
        response_lengths_N: Tensor,
        max_response_tokens: int,
        kept_N: Tensor | None = None,
        expert_N: Tensor | None = None,
    ) -> Tensor | None:
        """[N] weight of each sample's tokens in the KL and entropy terms, 0 for expert samples; None if `loss_weights` apply
        to these terms too."""
        if expert_N is not None:
            kept_N = ~expert_N if kept_N is None else kept_N & ~expert_N
        elif self.penalty_aggregate is self.aggregate:
            return None
        return _weights(self.penalty_aggregate, response_lengths_N, max_response_tokens, kept_N)

    # --- the loss ----------------------------------------------------------------------------------------------------

    def old_logprobs(self, logprobs_T: Tensor, batch: TokenBatch) -> Tensor:
        """Return the log-probs that the ratio compares with."""
        if self.ratio_reference == "reference":
            chosen_T = batch.ref_logprobs_T
        elif self.old_logprobs_from == "engine":
            chosen_T = batch.rollout_logprobs_T
        elif self.old_logprobs_from == "loglinear":
            assert batch.rollout_logprobs_T is not None and batch.interpolation_T is not None
            chosen_T = torch.lerp(batch.rollout_logprobs_T, logprobs_T.detach(), batch.interpolation_T)
        else:
            # With one update on fresh samples, the current log-probs are those before the update.
            chosen_T = logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
        assert chosen_T is not None
        return chosen_T

    def first_correction(self, batch: TokenBatch) -> tuple[Tensor, Tensor] | None:
        """(weight_T, kept_T) of the rollout correction in the first update on each sample; None without a correction.

        It excludes the rejection by `second_moment`, which is decided over all tokens of an update.
        """
        now_T = batch.first_logprobs_T if batch.old_logprobs_T is None else batch.old_logprobs_T
        if not self.rollout_correction.is_active or batch.rollout_logprobs_T is None or now_T is None:
            return None
        bounds = {name: bound for name, bound in self.rollout_correction.reject_divergence.items() if name != SECOND_MOMENT}
        mask_T = batch.loss_mask_T if batch.expert_T is None else batch.loss_mask_T & ~batch.expert_T
        before_T = now_T if self.old_logprobs_from == "engine" else self.old_logprobs(now_T, batch)
        correction = replace(self.rollout_correction, reject_divergence=bounds)
        return correction((before_T - batch.rollout_logprobs_T) * mask_T, Segments.of(batch))

    def loss(self, logprobs_T: Tensor, entropy_T: Tensor, batch: TokenBatch) -> LossOutput:
        """Return this micro-batch's share of the loss and of the step's metrics (a LossFn)."""
        assert batch.advantages_T is not None
        # Metrics cover sampled tokens only.
        expert_T = batch.expert_T
        mask_T = batch.loss_mask_T if expert_T is None else batch.loss_mask_T & ~expert_T
        weights_T, samples = batch.weights_T, Segments.of(batch)
        penalty_weights_T = weights_T if batch.penalty_weights_T is None else batch.penalty_weights_T
        share_T = mask_T / max(batch.update_tokens - batch.expert_tokens, 1)
        now_T = logprobs_T.detach()
        old_T = self.old_logprobs(logprobs_T, batch)
        log_ratio_T = self.importance_sampling_level(logprobs_T, old_T, samples)
        objective_T = self.surrogate(log_ratio_T, logprobs_T, batch.advantages_T, samples)
        sums = {"policy/entropy": (entropy_T.detach() * share_T).sum(), "policy/logprob_mean": (now_T * share_T).sum()}
        maxima = {}
        reported = self.surrogate.metrics(log_ratio_T.detach(), batch.advantages_T, samples)
        metric_weights_T = weights_T if self.ratio_reference == "reference" else share_T
        sums |= {name: (value_T * metric_weights_T).sum() for name, value_T in reported.items()}
        if self.ratio_reference == "old":
            ratio_T = log_ratio_T.detach().clamp(-20, 20).exp()
            sums["policy/ratio_mean"] = (ratio_T * share_T).sum()
            # Samples come from the old policy, so k3 of (old, now) estimates KL(old || now).
            sums["policy/kl_old"] = (kl.k3(old_T, now_T) * share_T).sum()
            maxima["policy/ratio_max"] = _largest(ratio_T * mask_T)
        if batch.rollout_logprobs_T is not None:
            before_T = now_T if batch.old_logprobs_T is None else batch.old_logprobs_T
            difference_T = (before_T - batch.rollout_logprobs_T) * mask_T
            size_T = difference_T.abs()
            sums["rollout/logprob_diff_mean"] = (size_T * share_T).sum()
            for bound in LOGPROB_DIFF_BOUNDS:
                sums[f"rollout/logprob_diff_over_{bound:g}"] = ((size_T > bound) * share_T).sum()
            sums["rollout/kl"] = (kl.k3(batch.rollout_logprobs_T, before_T) * share_T).sum()
            maxima["rollout/logprob_diff_max"] = _largest(size_T)
            if self.rollout_correction.is_active:
                if self.old_logprobs_from != "trainer":
                    # No trainer log-probs lie between the engine's and the current ones, so rejection compares these two.
                    before_T = now_T if self.old_logprobs_from == "engine" else old_T
                    difference_T = (before_T - batch.rollout_logprobs_T) * mask_T
                weight_T, kept_T = self.rollout_correction(difference_T, samples)
                objective_T = objective_T * weight_T
                weights_T, penalty_weights_T = weights_T * kept_T, penalty_weights_T * kept_T
                found = self.rollout_correction.metrics(difference_T, weight_T, kept_T, samples)
                sums |= {name: (value_T * share_T).sum() for name, value_T in found.items()}
                maxima["rollout_correction/ratio_max"] = _largest(found["rollout_correction/ratio_mean"] * mask_T)
        if expert_T is not None:
            assert self.imitation is not None
            objective_T = torch.where(expert_T, self.imitation(logprobs_T), objective_T)
            learned_T = (batch.loss_mask_T & expert_T) / max(batch.expert_tokens, 1)
            sums["expert/logprob_mean"] = (now_T * learned_T).sum()
        penalty_T = torch.zeros_like(objective_T)
        if batch.ref_logprobs_T is not None:
            sums["policy/kl_reference"] = (kl.k3(now_T, batch.ref_logprobs_T) * share_T).sum()
            if self.kl_coef and not self.kl_in_reward:
                kl_T = self.kl_coef * self.kl_estimator(logprobs_T, batch.ref_logprobs_T)
                penalty_T = penalty_T + (kl_T * ratio(log_ratio_T) if self.kl_ratio_weighted else kl_T)
        if self.entropy_coef:
            penalty_T = penalty_T - self.entropy_coef * entropy_T
        # Positive and negative terms cancel; with a float64 sum the reported loss does not depend on the split.
        loss = (penalty_T * penalty_weights_T - objective_T * weights_T).sum(dtype=torch.float64)
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    # --- after the updates -------------------------------------------------------------------------------------------

    def finalize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a whole update, with those added that are not sums of shares."""
        found = dict(metrics)
        if (square := found.pop("rollout_correction/weight_square_mean", None)) is not None:
            # (Σ w)² / (n Σ w²): share of unweighted samples with the same statistical efficiency (Kong, 1992).
            found["rollout_correction/effective_sample_size"] = (
                found["rollout_correction/weight_mean"] ** 2 / square if square else 0.0
            )
        return found

    def adapt_kl(self, kl_reference: float, samples: int) -> None:
        """Adapt the KL coefficient for the next step if it has a target. A KL that is not finite is ignored: no update of
        the step was taken."""
        if self.kl_target is not None and math.isfinite(kl_reference):
            self.kl_coef = kl.adapt(self.kl_coef, kl_reference, self.kl_target, samples, self.kl_horizon)


def make_objective(name: str, **choices: Any) -> Objective:
    """Return the objective of a method with `choices` in place of its defaults; raises ValueError for invalid choices."""
    overrides, findings = Choices(**choices), Findings(section="algorithm")
    check_values(overrides, findings)
    check_method(findings, name, overrides, group_size=2)
    if findings.errors:
        raise ValueError("\n".join(findings.errors))
    return Objective.of(methods.resolve(name, overrides))


def _choose(name: str, built_in: Callable[[str], Any]) -> Any:
    return load_user_code(name) if is_user_code(name) else built_in(name)


def _advantage(name: str, chosen: Choices) -> Advantage:
    return make_advantage(name, str(chosen.normalize), chosen.baseline_shift, chosen.baseline_temperature)


def _weights(aggregate: Aggregate, lengths_N: Tensor, max_response_tokens: int, kept_N: Tensor | None) -> Tensor:
    """[N] aggregation weights of the samples that are kept, 0 for the others."""
    if kept_N is None:
        return aggregate(lengths_N, max_response_tokens)
    weights_N = torch.zeros(len(lengths_N), dtype=torch.float64)
    weights_N[kept_N] = aggregate(lengths_N[kept_N], max_response_tokens)
    return weights_N


def _imitation(chosen: ExpertConfig) -> Imitation | None:
    if chosen.weight is None:
        return None
    final = chosen.weight if chosen.final_weight is None else chosen.final_weight
    assert chosen.warmup_updates is not None and chosen.decay_updates is not None and chosen.token_weight is not None
    aggregate = _choose(str(chosen.aggregate), AGGREGATES.__getitem__)
    return Imitation(chosen.weight, final, chosen.warmup_updates, chosen.decay_updates, chosen.token_weight, aggregate)


def _process(chosen: ProcessRewardConfig) -> ProcessReward | None:
    if not chosen.coef:
        return None
    given: dict[str, Any] = {item.name: getattr(chosen, item.name) for item in fields(chosen)}
    return ProcessReward(**given)


def _surrogate(chosen: Choices) -> Surrogate:
    name = str(chosen.surrogate)
    if is_user_code(name):
        return UserSurrogate(load_user_code(name))
    return make_surrogate(name, **{key: getattr(chosen, key) for key in methods.SURROGATES[name].parameters})


def _credit(chosen: Choices) -> Credit:
    name = str(chosen.credit)
    if is_user_code(name):
        return UserCredit(load_user_code(name))
    return make_credit(name, chosen.gamma, chosen.lam, chosen.bootstrap_truncated)


def _largest(values_T: Tensor) -> Tensor:
    return values_T.max() if len(values_T) else values_T.sum()
