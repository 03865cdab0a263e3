"""Models of a run by role: what each computes for a batch, how each is updated, and which one occupies the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch

from fivefold.algo.correction import interpolation
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

_FILLED_BY = {
    "old_logprobs_T": "policy",
    "half_temperature_logprobs_T": "policy",
    "ref_logprobs_T": "reference",
    "values_T": "critic",
    "prm_logprobs_T": "prm",
    "prm_ref_logprobs_T": "prm.reference",
}
"""Field of a batch -> the role that computes it."""


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

    def annotate(self, batch: TokenBatch, needs: frozenset[str], stats: RolloutStats | None = None) -> None:
        """Fill in the batch fields in `needs`: log-probs of each model, critic values, interpolation by token age.

        Samples that the policy does not train on (`stats.skipped_N`) get no policy or reference log-probs.
        """
        skipped_N = None if stats is None else stats.skipped_N
        trained = [n for n, row in enumerate(batch.sample_index_N) if skipped_N is None or not skipped_N[row]]
        everything = list(range(len(batch.lengths_N)))
        # A single update uses the same weights as the recording pass would, so it takes the same routes without replay.
        records = self.router_replay == "R2" and (self.updates > 1 or "old_logprobs_T" in needs)
        passes = []
        for name, role in _FILLED_BY.items():
            records_this = records and name == "old_logprobs_T"
            if name in needs or records_this:
                samples = trained if role in ("policy", "reference") else everything
                temperature = batch.temperature / (2 if name == "half_temperature_logprobs_T" else 1)
                temperature = 1.0 if name.startswith("prm_") else temperature
                part = replace(batch.select(samples), temperature=temperature, records_routes=records_this)
                if self.by_role[role] is not self.by_role.get("policy"):
                    # Routes are replayed for the policy only, since the other models did not sample.
                    part.routes_TLK = None
                passes.append((name, role, part, samples, begin_forward(self.by_role[role], part)))
        for _, role, _, _, one in passes:
            with self.on_device(self.served_by.get(role, role)):
                one.compute()
        for name, _, part, samples, one in passes:
            index_T, result_T = batch.token_index(samples), one.result()
            if part.records_routes and part.routes_TLK is not None:
                routes_TLK = part.routes_TLK.new_full((len(batch.token_ids_T), *part.routes_TLK.shape[1:]), NO_ROUTE)
                routes_TLK[index_T] = part.routes_TLK
                batch.routes_TLK = routes_TLK
            if name in needs:
                whole_T = torch.zeros(len(batch.token_ids_T))
                whole_T[index_T] = result_T
                setattr(batch, name, whole_T)
        if "interpolation_T" in needs:
            assert stats is not None
            batch.interpolation_T = interpolation(self.policy.version - token_versions(batch, stats), self.updates)

    def update(self, when: Learns, work: StepWork, step: int) -> None:
        """Take the remaining optimizer steps of the models that learn at `when`. Collective.

        Models on separate ranks learn at the same time; all of them have finished when this returns.
        """
        ending: list[tuple[Learner, Callable[[], None]]] = []
        for name, learner in self.learners.items():
            if learner.when is when:
                with self.stage(learner.stage):
                    ending.append((learner, self._begin(name, learner, work, step)))
        # Wait at the end: ranks without a model may still be training another one.
        for learner, finish in reversed(ending):
            with self.stage(learner.stage):
                finish()

    def _begin(self, name: str, learner: Learner, work: StepWork, step: int) -> Callable[[], None]:
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
                self.guard.check(report, update.batch, name, step)
                reports.append(update.finish(report))

        with self.on_device(name):
            if learner.sends_ahead and not self.ranks.is_everywhere:
                # Send all samples before the first update computes, so that no rank waits for a computing one.
                for one in [begin(update) for update in learner.updates(self, work, step)]:
                    one.compute()
                return finish
            for update in learner.updates(self, work, step):
                begin(update).compute()
                if self.ranks.is_everywhere or learner.waits:
                    finish()
        return finish
