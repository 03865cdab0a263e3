"""Optimizer steps of each trained model on a rollout: StepWork -> updates, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import ClassVar, Protocol, cast

from fivefold.algo.objective import Objective
from fivefold.algo.term import Progress
from fivefold.algo.terms.process_reward import ProcessReward, pair_accuracy
from fivefold.algo.values import ValueLoss
from fivefold.columns import Column
from fivefold.config.roles import Learns
from fivefold.distributed.ranks import Ranks
from fivefold.engines.sampling import request_seed
from fivefold.interfaces import FrozenModel, Model
from fivefold.trainer.minibatches import MiniBatch, MiniBatches, divided, select_tokens, skipped_share, without_skipped
from fivefold.trainer.step_work import StepWork
from fivefold.types import LossFn, StepReport, TokenBatch


@dataclass(frozen=True)
class Update:
    """One optimizer step of a model: its batch and its loss."""

    batch: TokenBatch
    loss: LossFn
    finish: Callable[[StepReport], StepReport] = lambda report: report
    """Returns the report with its final metrics."""


class Device(Protocol):
    """Access of a learner to the other models of the run."""

    @property
    def by_role(self) -> dict[str, FrozenModel]: ...

    def annotate(self, batch: TokenBatch, needs: frozenset[Column]) -> None: ...


class Learner:
    """Produces the updates of one model from a rollout."""

    when: ClassVar[Learns] = Learns.WITH_POLICY
    stage: str
    """Name under which its time is reported in the metrics."""
    waits: ClassVar[bool] = False
    """Whether an update starts only after the previous update's report, even if the model has ranks of its own."""

    @property
    def sends_ahead(self) -> bool:
        """Whether all its updates are known before the first one is taken, so that samples can be sent ahead."""
        return False

    def updates(self, models: Device, work: StepWork, progress: Progress) -> Iterator[Update]:
        """Yield the updates after those that already have a report in `work`. Collective."""
        raise NotImplementedError


@dataclass(frozen=True)
class MiniBatchLearner(Learner):
    """Trains a model on the mini-batches of the objective."""

    objective: Objective
    minibatches: MiniBatches
    ranks: Ranks

    def left(self, role: str, work: StepWork, progress: Progress) -> Iterator[MiniBatch]:
        """Return the mini-batches for which the model has no report yet."""
        return islice(self.minibatches(work.batch, work.stats, progress.step), len(work.reports[role]), None)


@dataclass(frozen=True)
class PolicyLearner(MiniBatchLearner):
    """Trains the policy on the mini-batches of the rollout with the objective's loss."""

    seed: int = 0
    first_step: int = 0
    """First step in which the policy learns; before it, only the critic learns."""
    stage = "train"

    def updates(self, models: Device, work: StepWork, progress: Progress) -> Iterator[Update]:
        """Yield one update per mini-batch, without the samples that add nothing to the loss."""
        if progress.step < self.first_step:
            return
        policy = cast(Model, models.by_role["policy"])
        for mini in self.left("policy", work, progress):
            seed = request_seed([self.seed, progress.step, mini.number])
            batch = select_tokens(without_skipped(mini), self.objective, policy, self.ranks, seed)
            yield Update(batch, partial(self.objective.loss, progress=progress), self._finish(mini, batch))

    def _finish(self, mini: MiniBatch, batch: TokenBatch) -> Callable[[StepReport], StepReport]:
        def finish(report: StepReport) -> StepReport:
            # A mini-batch without tokens has no means.
            metrics = self.objective.finalize_metrics(report.metrics) if batch.update_tokens else {}
            return replace(report, metrics=metrics | skipped_share(mini))

        return finish


@dataclass(frozen=True)
class CriticLearner(MiniBatchLearner):
    """Trains the critic on the policy's mini-batches with the value loss."""

    loss: ValueLoss
    values_per_update: bool = False
    """Whether values and advantages of an update are recomputed with the critic as it is after the previous updates."""
    stage = "critic"

    @property
    def sends_ahead(self) -> bool:
        return not self.values_per_update

    def updates(self, models: Device, work: StepWork, progress: Progress) -> Iterator[Update]:
        """Yield one update per mini-batch, with all its samples."""
        for mini in self.left("critic", work, progress):
            if self.values_per_update:
                self._revalue(models.by_role["critic"], mini, progress)
            yield Update(mini.batch.with_columns({Column.ROUTES: None}), self.loss, self._finish)

    def _finish(self, report: StepReport) -> StepReport:
        return replace(report, metrics=self.loss.finalize_metrics(report.metrics))

    def _revalue(self, critic: FrozenModel, mini: MiniBatch, progress: Progress) -> None:
        """Recompute this update's values with the current critic, and its advantages over this update alone.

        The policy's update uses them too.
        """
        part, index = mini.batch, mini.source.token_index(mini.places)
        part[Column.VALUES] = critic.forward(part.with_columns({Column.ROUTES: None}))
        self.objective.assign_advantages(part, mini.stats, self.ranks, progress)
        for column in (Column.VALUES, Column.ADVANTAGES, Column.RETURNS):
            mini.source[column][index] = part[column]


@dataclass(frozen=True)
class ProcessRewardLearner(Learner):
    """Trains the process reward model on whole groups of the rollout by their outcomes, and rewards their tokens."""

    process: ProcessReward
    ranks: Ranks
    stage: str
    updates_per_step: int = 1
    when = Learns.BEFORE_ADVANTAGES
    waits = True

    def updates(self, models: Device, work: StepWork, progress: Progress) -> Iterator[Update]:
        """Yield the updates of the model, before or after it rewards the tokens of the step, as the method chooses."""
        process, batch, stats, reports = self.process, work.batch, work.stats, work.reports[self.stage]
        if process.update == "after" and Column.PRM_LOGPROBS not in batch:
            models.annotate(batch, frozenset({Column.PRM_LOGPROBS}))
        is_scored = Column.PRM_LOGPROBS in batch
        before_N = process.scores(batch, len(stats), self.ranks.all_reduce_sum) if is_scored else None
        targets_N = process.targets(stats)
        for rows_N, places in islice(divided(batch, stats, self.updates_per_step), len(reports), None):
            # The routes are the policy's.
            part = batch.select(places).with_columns({Column.ROUTES: None})
            part = replace(part, temperature=1.0, update_tokens=int(stats.response_lengths_N[rows_N].sum()))
            yield Update(part, process.model_loss(targets_N, stats.group_N, before_N, samples=len(rows_N)))
        if not is_scored:
            models.annotate(batch, frozenset({Column.PRM_LOGPROBS}))
        scores_N = process.scores(batch, len(stats), self.ranks.all_reduce_sum)
        if (accuracy := pair_accuracy(scores_N, targets_N, stats.group_N)) is not None:
            reports[-1] = replace(reports[-1], metrics={**reports[-1].metrics, f"{self.stage}/pair_accuracy": accuracy})
