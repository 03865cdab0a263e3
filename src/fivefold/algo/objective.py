"""An objective is one choice on each axis: Choices -> advantages of a step, and the loss of its updates, a sum of terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.aggregate import Aggregation, weights_of
from fivefold.algo.choices import Choices
from fivefold.algo.methods import METHODS, check_method, resolve
from fivefold.algo.reward_shaping import RewardShaping
from fivefold.algo.sample_filter import SampleFilter
from fivefold.algo.segments import Segments
from fivefold.algo.term import Progress, Term
from fivefold.algo.terms import TERMS
from fivefold.algo.terms.imitation import Imitation
from fivefold.algo.terms.kl import KL
from fivefold.algo.terms.policy_gradient import PolicyGradient
from fivefold.algo.terms.process_reward import ProcessReward
from fivefold.algo.token_advantages import TokenAdvantages
from fivefold.algo.turns import rewards_of_turns
from fivefold.columns import Column
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.keys.ranges import OneOf, check_values
from fivefold.keys.typed import make
from fivefold.lazy import Tensor, torch
from fivefold.types import LossOutput, RolloutStats, TokenBatch

T = TypeVar("T", bound=Term)


class Replicas(Protocol):
    """Reduces numbers over the data-parallel replicas of a step."""

    def all_reduce_sum(self, sums: Tensor) -> Tensor:
        """Return the sum over replicas."""
        ...

    def all_reduce_max(self, number: float) -> float:
        """Return the maximum over replicas."""
        ...


@dataclass(frozen=True)
class Objective:
    """Composes the parts: rewards -> advantages before the updates, then the sum of the terms of each update's loss."""

    shaping: RewardShaping
    """Changes of rewards before they are compared."""
    filter: SampleFilter
    """Samples that carry loss."""
    advantage: TokenAdvantages
    """Comparison of the rewards, and the advantage of each token."""
    process: ProcessReward
    """Token rewards from a process reward model that learns with the policy, if that is active."""
    gradient: PolicyGradient
    """Surrogate with its ratio and its rollout correction."""
    terms: tuple[Term, ...]
    """Terms of the loss next to the policy gradient, active or not."""
    aggregation: Aggregation
    """Weights of tokens."""

    @classmethod
    def of(cls, chosen: Choices) -> Objective:
        """Build the objective from resolved choices."""
        return cls(
            RewardShaping.of(chosen),
            SampleFilter.of(chosen),
            TokenAdvantages.of(chosen),
            ProcessReward.of(chosen),
            PolicyGradient.of(chosen),
            tuple(term.of(chosen) for term in TERMS),
            Aggregation.of(chosen),
        )

    def term(self, kind: type[T]) -> T:
        """Return the term of this class."""
        return next(term for term in self.terms if isinstance(term, kind))

    @property
    def kl(self) -> KL:
        return self.term(KL)

    @property
    def imitation(self) -> Imitation:
        return self.term(Imitation)

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage compares with the most likely response to the prompt."""
        return self.advantage.advantage == "greedy_baseline"

    def needs(self, updates: int) -> frozenset[Column]:
        """Return the columns of the batch that must be filled in before `updates` optimizer steps on it."""
        needed = (part.needs(updates) for part in (self.advantage, self.process, *self.terms))
        return self.gradient.needs(updates).union(*needed)

    def assign_advantages(
        self, batch: TokenBatch, stats: RolloutStats, replicas: Replicas, progress: Progress = Progress()
    ) -> None:
        """Set `advantages_T` and `returns_T` of this replica's batch from the rewards of the whole step. Collective."""
        inputs, trajectories = self.inputs(stats), stats.trajectories
        kept_M, part_M = self.filter.before_whitening.kept(trajectories, inputs), self.advantage.parts(trajectories)
        batch[Column.ADVANTAGES], batch[Column.RETURNS] = self.advantages(
            batch, inputs, trajectories.finished_N, replicas, kept_M, part_M, progress, stats
        )
        # Not used after this point.
        batch.columns.pop(Column.HALF_TEMPERATURE_LOGPROBS, None)

    def inputs(self, stats: RolloutStats) -> AdvantageInputs:
        """Return the rewards of the step's trajectories as the method shapes them, with what they are compared by."""
        stats = stats.trajectories
        limit, greedy_N = stats.max_response_tokens, stats.greedy_rewards_N
        return AdvantageInputs(
            rewards_N=self.shaping(stats.rewards_N, stats.response_lengths_N, limit),
            group_N=stats.group_N,
            lengths_N=stats.response_lengths_N,
            truncated_N=~stats.finished_N,
            greedy_rewards_N=None if greedy_N is None else self.shaping(greedy_N, stats.greedy_lengths_N, limit),
            expert_N=stats.expert_N,
            unrewarded_N=stats.rewards_N == 0,
        )

    def compared(self, inputs: AdvantageInputs) -> Tensor:
        """[N] advantage of each response of the step."""
        return torch.where(self.filter.zeroed(inputs), 0.0, self.advantage.compare(inputs))

    def kept(self, stats: RolloutStats) -> Tensor | None:
        """[M] trajectories that carry loss, by truncation and prompt difficulty; None if all do."""
        return self.filter.kept(stats.trajectories, self.inputs(stats))

    def skipped(self, stats: RolloutStats) -> Tensor | None:
        """[N] samples that add exactly nothing to the loss and its gradient, as far as the step's rewards determine that.

        Such samples carry no loss, or have zero advantage where the loss is only the surrogate. None if every sample
        influences the terms of others, so that none can be skipped.
        """
        gradient, kl, whitens = self.gradient, self.kl, self.advantage.whiten
        depends = gradient.selects or self.aggregation.per_micro_batch or kl.is_in_reward or kl.target is not None
        if not gradient.vanishes or depends or self.process.is_active or self.advantage.token_baseline:
            return None
        inputs = self.inputs(stats)
        kept_M = (self.filter.before_whitening if whitens else self.filter).kept(stats.trajectories, inputs)
        skipped_M = torch.zeros(len(inputs.rewards_N), dtype=torch.bool) if kept_M is None else ~kept_M
        has_term = any(term.is_active and not term.expert_only for term in self.terms)
        compares = whitens or self.advantage.turn_coef != 0
        if not has_term and not compares and self.advantage.assignment.keeps_zero:
            skipped_M = skipped_M | (self.compared(inputs) == 0)
        return skipped_M[stats.trajectory_of_N]

    def advantages(
        self,
        batch: TokenBatch,
        inputs: AdvantageInputs,
        finished_N: Tensor,
        replicas: Replicas,
        kept_N: Tensor | None = None,
        part_N: Tensor | None = None,
        progress: Progress = Progress(),
        stats: RolloutStats | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(advantages_T, returns_T) of this replica's tokens, 0 outside of responses.

        `inputs`, `finished_N` (the response ended by itself), `kept_N` (it carries loss) and `part_N` cover the whole step,
        with a row per trajectory of `stats` (a row per sample without them). `part_N` numbers, from 0, the parts that are
        whitened separately.
        """
        total, turns = replicas.all_reduce_sum, None if stats is None else stats.turns
        segments, row_N = Segments.of_trajectories(batch, None if stats is None else stats.trajectory_N)
        penalties_T = torch.zeros(len(batch.token_ids_T))
        if self.kl.is_in_reward:
            is_trainer = self.gradient.correction.old_logprobs_from == "trainer"
            old_T = batch[Column.OLD_LOGPROBS if is_trainer else Column.ROLLOUT_LOGPROBS]
            penalties_T = self.kl.reward_penalty(old_T, batch, progress)
            if not self.advantage.assignment.by_token:
                # Each sample is on exactly one replica, so the sum over replicas is the penalty of each sample.
                penalties_N = torch.zeros(len(inputs.rewards_N), dtype=torch.float64)
                penalties_N[row_N] = segments.sums(penalties_T).double()
                inputs = replace(inputs, rewards_N=inputs.rewards_N - total(penalties_N))
        advantages_N = self.advantage.compare(inputs)[row_N]
        if self.process.is_active:
            rewards_T = self.process.rewards(batch, segments, replicas.all_reduce_max)
            gains_T = self.process.advantages(segments, row_N, inputs.group_N, rewards_T, total)
            advantages_N, penalties_T = self.process.outcome_coef * advantages_N, penalties_T - gains_T
        assign, values_T = self.advantage.assignment, batch.columns.get(Column.VALUES)
        if stats is not None and turns is not None and assign.by_turn:
            scale = self.shaping.reward_scale * (self.process.outcome_coef if self.process.is_active else 1.0)
            earned_T = scale * rewards_of_turns(batch, stats, turns)
            advantages_N, penalties_T = advantages_N - segments.sums(earned_T), penalties_T - earned_T
        advantages_T, returns_T = assign(advantages_N, penalties_T, values_T, finished_N[row_N], segments)
        if stats is not None and turns is not None and self.advantage.turn_coef:
            advantages_T += self.advantage.of_turns(batch, stats, turns, inputs, self.shaping.reward_scale)
        if self.advantage.token_baseline:
            baseline_T = self.advantage.baseline(batch, segments, row_N, returns_T, inputs, self.gradient.correction, total)
            advantages_T = advantages_T - baseline_T
        advantages_T = self.advantage.scaled(advantages_T, segments, row_N, kept_N, part_N, total)
        return torch.where(self.filter.zeroed(inputs)[row_N][segments.sample_T], 0.0, advantages_T), returns_T

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
        aggregate, lengths = self.aggregation.of_policy, (response_lengths_N, max_response_tokens)
        if expert_N is None:
            return weights_of(aggregate, *lengths, kept_N)
        share, sampled_N = self.imitation.share(update), ~expert_N if kept_N is None else kept_N & ~expert_N
        weights_N = (1 - share) * weights_of(aggregate, *lengths, sampled_N)
        return weights_N + share * weights_of(self.imitation.aggregation, *lengths, expert_N)

    def penalty_weights(
        self,
        response_lengths_N: Tensor,
        max_response_tokens: int,
        kept_N: Tensor | None = None,
        expert_N: Tensor | None = None,
    ) -> Tensor | None:
        """[N] weight of each sample's tokens in penalties as KL and entropy, 0 for expert samples; None if `loss_weights`
        apply to them too."""
        if expert_N is not None:
            kept_N = ~expert_N if kept_N is None else kept_N & ~expert_N
        elif not self.aggregation.has_own_penalties:
            return None
        return weights_of(self.aggregation.of_penalties, response_lengths_N, max_response_tokens, kept_N)

    def value_weights(
        self, response_lengths_N: Tensor, max_response_tokens: int, kept_N: Tensor | None = None
    ) -> Tensor | None:
        """[N] weight of each sample's tokens in the critic's loss; None if `loss_weights` apply to it too."""
        aggregate = self.aggregation.of_values
        return None if aggregate is None else weights_of(aggregate, response_lengths_N, max_response_tokens, kept_N)

    def loss(self, logprobs_T: Tensor, entropy_T: Tensor, batch: TokenBatch, progress: Progress = Progress()) -> LossOutput:
        """Return this micro-batch's share of the loss to minimize, with its gradient, and of the step's metrics (a LossFn).

        `logprobs_T` and `entropy_T` have a number per token of the batch at its temperature; entropies may be 0 unless
        algorithm.entropy_coef is set, and numbers on prompts are not used. The batch needs loss weights and advantages. The
        sum is float64: positive and negative terms cancel, and the loss does not depend on the split. Raises UserError for
        a batch that `prepare_update` did not return, and for another number of log-probs than tokens.
        """
        if missing := [column.value for column in (Column.ADVANTAGES, Column.LOSS_WEIGHTS) if column not in batch]:
            raise UserError(f"the batch must come from `prepare_update`: it has no {' and no '.join(missing)}")
        for name, values_T in (("logprobs_T", logprobs_T), ("entropy_T", entropy_T)):
            if values_T.shape != batch.token_ids_T.shape:
                raise UserError(
                    f"{name} must have a number for each of the {len(batch.token_ids_T)} tokens of the batch: got shape "
                    f"{list(values_T.shape)}"
                )
        tokens = self.gradient.tokens(logprobs_T, entropy_T, batch, progress)
        policy = self.gradient(tokens)
        values = {"loss": policy.loss_T, "penalty": torch.zeros_like(policy.loss_T)}
        weights = {"loss": batch.weights_T, "penalty": batch.columns.get(Column.PENALTY_WEIGHTS, batch.weights_T)}
        if policy.kept_T is not None:
            weights = {name: weights_T * policy.kept_T for name, weights_T in weights.items()}
        sums = policy.sums
        for term in self.terms:
            sums |= term.metrics(tokens)
            if term.is_active:
                values[term.weights] = values[term.weights] + term.loss(tokens)
        loss = (values["penalty"] * weights["penalty"] + values["loss"] * weights["loss"]).sum(dtype=torch.float64)
        return LossOutput(loss=loss, sums=sums, maxima=policy.maxima)

    def finalize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a whole update, with those added that are not sums of shares."""
        finalized = dict(metrics)
        if (square := finalized.pop("rollout_correction/weight_square_mean", None)) is not None:
            # (Σ w)² / (n Σ w²): share of unweighted samples with the same statistical efficiency (Kong, 1992).
            finalized["rollout_correction/effective_sample_size"] = (
                finalized["rollout_correction/weight_mean"] ** 2 / square if square else 0.0
            )
        return finalized


def make_objective(name: str, **choices: Any) -> Objective:
    """Return the objective of a method with `choices` in place of its defaults, as the section `algorithm` has them.

    A function may be passed wherever `path.py:function` is allowed. Raises UserError for invalid choices.

    Example: `make_objective("grpo", clip_high=0.28, kl={"coef": 0.001}, advantage=my_advantage)`.
    """
    findings = Findings(section="algorithm")
    if fault := OneOf(METHODS).fault(name):
        raise UserError(f"the name of the method {fault}")
    overrides = make(Choices, choices, findings)
    if overrides is not None:
        check_values(overrides, findings)
    if overrides is not None and not findings.errors:
        check_method(findings, name, overrides, group_size=2)
    if findings.errors:
        raise UserError("\n".join(findings.errors))
    return Objective.of(resolve(name, overrides))
