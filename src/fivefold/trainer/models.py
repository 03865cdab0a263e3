"""Models of a run by role: what each computes for a batch, how each is updated, and which one occupies the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch

from fivefold.algo.correction import interpolation
from fivefold.algo.term import Progress
from fivefold.columns import Column
from fivefold.config.roles import Learns
from fivefold.distributed.ranks import Ranks
from fivefold.distributed.redealing import Pass, begin_forward, begin_train_step
from fivefold.engines.weight_sync import weight_sync
from fivefold.interfaces import Engine, FrozenModel, Model
from fivefold.routes import NO_ROUTE
from fivefold.trainer.checks import AdapterGuard, SkipGuard
from fivefold.trainer.learners import Learner, Update
from fivefold.trainer.step_work import StepWork
from fivefold.types import RolloutStats, StepReport, TokenBatch, token_versions


@dataclass(frozen=True)
class Models:
    """Models by role. Between their turns, each offloads what its configuration names."""

    by_role: dict[str, FrozenModel]
    ranks: Ranks
    guard: SkipGuard
    learners: Mapping[str, Learner] = field(default_factory=dict)
    """Learner of each trained model by role, in the order in which they start."""
    served_by: Mapping[str, str] = field(default_factory=dict)
    """Role -> the role whose model also serves it."""
    stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    """Times a part of a step."""
    updates: int = 1
    """Optimizer steps of the policy per step: the version difference between two consecutive steps."""
    router_replay: Literal["R2", "R3"] | None = None
    adapters: AdapterGuard | None = None
    """Reports how much of the adapters the engine's dtype loses; None without adapters."""

    @property
    def policy(self) -> Model:
        return cast(Model, self.by_role["policy"])

    @property
    def trained(self) -> dict[str, Model]:
        """The models that are trained and saved, by the name of their directory in a checkpoint."""
        return {name: cast(Model, model) for name, model in self.by_role.items() if name in self.learners}

    def sync(self, engine: Engine | None) -> None:
        """Send the policy's weights to the engine if the engine's are older. Collective."""
        with self.on_device(parameters_of="policy"):
            if weight_sync(self.policy, engine) and self.adapters is not None:
                self.adapters.check(self.policy.version)

    @contextmanager
    def on_device(self, *names: str, parameters_of: str = "") -> Iterator[None]:
        """Keep these models on the device, and the parameters of `parameters_of`. Offload the other models as configured."""
        for name, model in self.by_role.items():
            if name not in self.served_by and name not in names:
                model.offload(parameters=name != parameters_of)
        yield

    @contextmanager
    def away(self) -> Iterator[None]:
        """Offload all models as configured while the engine samples. Meanwhile, memory for their next offload is allocated.

        Allocating it earlier could fail: an engine that starts captures CUDA graphs, during which no other thread may call
        the driver.
        """
        with self.on_device():
            for name, model in self.by_role.items():
                if name not in self.served_by:
                    model.prepare_offload()
            yield

    def annotate(self, batch: TokenBatch, needs: frozenset[Column], stats: RolloutStats | None = None) -> None:
        """Fill in the columns in `needs`: log-probs of each model, critic values, interpolation by token age.

        Samples that the policy does not train on (`stats.skipped_N`) get no policy or reference log-probs.
        """
        skipped_N = None if stats is None else stats.skipped_N
        trained = [n for n, row in enumerate(batch.sample_index_N) if skipped_N is None or not skipped_N[row]]
        everything = list(range(len(batch.lengths_N)))
        # A single update uses the same weights as the recording pass would, so it takes the same routes without replay.
        records = self.router_replay == "R2" and (self.updates > 1 or Column.OLD_LOGPROBS in needs)
        passes = []
        for column in Column:
            records_this = records and column is Column.OLD_LOGPROBS
            if column.temperature is None or not (column in needs or records_this):
                continue
            role = column.filled_by
            samples = trained if role in ("policy", "reference") else everything
            temperature = column.temperature(batch.temperature)
            part = replace(batch.select(samples), temperature=temperature, records_routes=records_this)
            if self.by_role[role] is not self.by_role.get("policy"):
                # Routes are replayed for the policy only, since the other models did not sample.
                part.columns.pop(Column.ROUTES, None)
            passes.append((column, part, samples, begin_forward(self.by_role[role], part)))
        for column, _, _, one in passes:
            with self.on_device(self.served_by.get(column.filled_by, column.filled_by)):
                one.compute()
        for column, part, samples, one in passes:
            index_T, result_T = batch.token_index(samples), one.result()
            if part.records_routes and Column.ROUTES in part:
                recorded_TLK = part[Column.ROUTES]
                routes_TLK = recorded_TLK.new_full((len(batch.token_ids_T), *recorded_TLK.shape[1:]), NO_ROUTE)
                routes_TLK[index_T] = recorded_TLK
                batch[Column.ROUTES] = routes_TLK
            if column in needs:
                whole_T = torch.zeros(len(batch.token_ids_T))
                whole_T[index_T] = result_T
                batch[column] = whole_T
        if Column.INTERPOLATION in needs:
            assert stats is not None
            batch[Column.INTERPOLATION] = interpolation(self.policy.version - token_versions(batch, stats), self.updates)
        missing = [column.value for column in Column if column in needs and column not in batch]
        assert not missing, f"no model fills in {missing}"

    def update(self, when: Learns, work: StepWork, progress: Progress) -> None:
        """Take the remaining optimizer steps of the models that learn at `when`. Collective.

        Models on separate ranks learn at the same time; all of them have finished when this returns.
        """
        ending: list[tuple[Learner, Callable[[], None]]] = []
        for name, learner in self.learners.items():
            if learner.when is when:
                with self.stage(learner.stage):
                    ending.append((learner, self._begin(name, learner, work, progress)))
        # Wait at the end: ranks without a model may still be training another one.
        for learner, finish in reversed(ending):
            with self.stage(learner.stage):
                finish()

    def _begin(self, name: str, learner: Learner, work: StepWork, progress: Progress) -> Callable[[], None]:
        """Start the updates of one model. The returned function waits for them and adds their reports to `work`."""
        model, reports = cast(Model, self.by_role[name]), work.reports[name]
        begun: list[tuple[Update, Pass[StepReport]]] = []

        def begin(update: Update) -> Pass[StepReport]:
            begun.append((update, begin_train_step(model, update.batch, update.loss)))
            return begun[-1][1]

        def finish() -> None:
            while begun:
                update, one = begun.pop(0)
                report = one.result()
                self.guard.check(report, update.batch, name, progress.step)
                reports.append(update.finish(report))

        with self.on_device(name):
            if learner.sends_ahead and not self.ranks.is_everywhere:
                # Send all samples before the first update computes, so that no rank waits for a computing one.
                for one in [begin(update) for update in learner.updates(self, work, progress)]:
                    one.compute()
                return finish
            for update in learner.updates(self, work, progress):
                begin(update).compute()
                if self.ranks.is_everywhere or learner.waits:
                    finish()
        return finish
