"""The models of a run by their roles: what each computes for a batch, what it learns from it, and which has the device."""

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
    """Models by role; what leaves the device between their turns is what their configuration names."""

    by_role: dict[str, FrozenModel]
    ranks: Ranks
    guard: SkipGuard
    learners: Mapping[str, Learner] = field(default_factory=dict)
    """How each model that is trained learns, by its role, in the order in which they begin."""
    served_by: Mapping[str, str] = field(default_factory=dict)
    """Roles that the model of another role serves as."""
    stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    """Times a part of a step."""
    updates: int = 1
    """Optimizer steps of the policy in a step: versions by which weights of two steps differ."""
    router_replay: Literal["R2", "R3"] | None = None
    adapters: AdapterGuard | None = None
    """Looks at what the engine's dtype loses of the policy's; None without any."""

    @property
    def policy(self) -> Model:
        return cast(Model, self.by_role["policy"])

    @property
    def trained(self) -> dict[str, Model]:
        """The models that are trained and saved, by the name of their part of a checkpoint."""
        return {name: cast(Model, model) for name, model in self.by_role.items() if name in self.learners}

    def sync(self, engine: Engine | None) -> None:
        """Give the engine the policy's weights, where it has older ones. Collective."""
        with self.on_device(parameters_of="policy"):
            if weight_sync(self.policy, engine) and self.adapters is not None:
                self.adapters.check(self.policy.version)

    @contextmanager
    def on_device(self, *names: str, parameters_of: str = "") -> Iterator[None]:
        """Give these models the device, and one its parameters: the others leave it, as far as they are offloaded."""
        for name, model in self.by_role.items():
            if name not in self.served_by and name not in names:
                model.offload(parameters=name != parameters_of)
        yield

    def annotate(self, batch: TokenBatch, needs: frozenset[str], stats: RolloutStats | None = None) -> None:
        """Fill in the fields of `needs`: log-probs of each model, values of the critic, ages of tokens.

        Samples that the policy does not train on (`stats.skipped_N`) get no log-probs of policy and reference.
        """
        skipped_N = None if stats is None else stats.skipped_N
        trained = [n for n, row in enumerate(batch.sample_index_N) if skipped_N is None or not skipped_N[row]]
        everything = list(range(len(batch.lengths_N)))
        # One update with the weights that would have recorded routes takes the same by itself.
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
                    # The other models are not replayed: they are not what has sampled.
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
        """Take the optimizer steps of the models that learn then, after those that have a report. Collective.

        Models on ranks of their own learn at the same time; all have ended when this returns.
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
        """Begin the updates of one model; the function waits for them and adds their reports to those of `work`."""
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
                # All samples go there before the first of them is computed with: no rank waits for one that computes.
                for one in [begin(update) for update in learner.updates(self, work, step)]:
                    one.compute()
                return finish
            for update in learner.updates(self, work, step):
                begin(update).compute()
                if self.ranks.is_everywhere or learner.waits:
                    finish()
        return finish
