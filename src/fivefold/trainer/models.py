"""The models of a run as one noun: what each computes for a batch, what each learns from it, and who is on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch

from fivefold.algo import Objective
from fivefold.algo.correction import interpolation
from fivefold.algo.process_reward import pair_accuracy
from fivefold.algo.values import ValueLoss
from fivefold.distributed.ranks import Ranks
from fivefold.distributed.redealing import Pass, begin_forward, begin_train_step
from fivefold.engines.sampling import request_seed
from fivefold.engines.weight_sync import weight_sync
from fivefold.interfaces import Engine, FrozenModel, Model
from fivefold.routes import NO_ROUTE
from fivefold.trainer.checks import AdapterGuard, SkipGuard
from fivefold.trainer.minibatches import MiniBatch, divided, select_tokens, skipped_share, without_skipped
from fivefold.types import RolloutStats, StepReport, TokenBatch, token_versions


@dataclass(frozen=True)
class Models:
    """Policy, reference, critic and process reward model; what leaves the device between their turns is what their
    configuration names."""

    policy: Model
    reference: FrozenModel | None
    critic: Model | None
    objective: Objective
    value_loss: ValueLoss
    ranks: Ranks
    guard: SkipGuard
    seed: int = 0
    critic_warmup: int = 0
    """Steps in which only the critic learns."""
    values_per_update: bool = False
    """Values and advantages of an update are those of the critic that the updates before it have left."""
    reference_is_base: bool = False
    """The reference is the policy without its adapters: they are on the device together."""
    updates: int = 1
    """Optimizer steps of a step: versions by which weights of two steps differ."""
    router_replay: Literal["R2", "R3"] | None = None
    prm: Model | None = None
    prm_reference: FrozenModel | None = None
    """What it is compared with; None where that is the policy."""
    prm_reference_is_base: bool = False
    """It is the process reward model without its adapters."""
    prm_updates: int = 1
    """Its optimizer steps in a step."""
    adapters: AdapterGuard | None = None
    """Looks at what the engine's dtype loses of the policy's; None without any."""

    @property
    def learners(self) -> dict[str, Model]:
        """The models that are trained and saved, by the name of their part of a checkpoint."""
        every = {"policy": self.policy, "critic": self.critic, "prm": self.prm}
        return {name: model for name, model in every.items() if model is not None}

    def sync(self, engine: Engine | None) -> None:
        """Give the engine the policy's weights, where it has older ones. Collective."""
        with self.on_device(parameters_of="policy"):
            if weight_sync(self.policy, engine) and self.adapters is not None:
                self.adapters.check(self.policy.version)

    @contextmanager
    def on_device(self, *names: str, parameters_of: str = "") -> Iterator[None]:
        """Give these models the device, and one its parameters: the others leave it, as far as they are offloaded."""
        every: dict[str, FrozenModel | None] = {**self.learners, "reference": self.reference}
        every["prm.reference"] = self.prm_reference
        for name, model in every.items():
            if model is not None and name not in names:
                model.offload(parameters=name != parameters_of)
        yield

    def annotate(self, batch: TokenBatch, needs: frozenset[str], stats: RolloutStats | None = None) -> None:
        """Fill in the fields of `needs`: log-probs of each model, values of the critic, ages of tokens.

        Samples that the policy does not train on (`stats.skipped_N`) get no log-probs.
        """
        skipped_N = None if stats is None else stats.skipped_N
        trained = [n for n, row in enumerate(batch.sample_index_N) if skipped_N is None or not skipped_N[row]]
        everything = list(range(len(batch.lengths_N)))
        # One update with the weights that would have recorded routes takes the same by itself.
        records = self.router_replay == "R2" and (self.updates > 1 or "old_logprobs_T" in needs)
        wanted = {
            "old_logprobs_T": ("policy", self.policy, trained),
            "half_temperature_logprobs_T": ("policy", self.policy, trained),
            "ref_logprobs_T": ("policy" if self.reference_is_base else "reference", self.reference, trained),
            "values_T": ("critic", self.critic, everything),
            "prm_logprobs_T": ("prm", self.prm, everything),
            "prm_ref_logprobs_T": self._prm_reference(everything),
        }
        passes = []
        for name, (role, model, samples) in wanted.items():
            records_this = records and name == "old_logprobs_T"
            if name in needs or records_this:
                assert model is not None
                temperature = batch.temperature / (2 if name == "half_temperature_logprobs_T" else 1)
                temperature = 1.0 if name.startswith("prm_") else temperature
                part = replace(batch.select(samples), temperature=temperature, records_routes=records_this)
                if model is not self.policy:
                    # The other models are not replayed: they are not what has sampled.
                    part.routes_TLK = None
                passes.append((name, role, part, samples, begin_forward(model, part)))
        for _, role, _, _, one in passes:
            with self.on_device(role):
                one.compute()
        for name, _, part, samples, one in passes:
            index_T, result_T = batch.token_index(samples), one.result()
            if part.records_routes and part.routes_TLK is not None:
                routes_TLK = part.routes_TLK.new_full((len(batch.token_ids_T), *part.routes_TLK.shape[1:]), NO_ROUTE)
                routes_TLK[index_T] = part.routes_TLK
                batch.routes_TLK = routes_TLK
            if name in needs:
                found_T = torch.zeros(len(batch.token_ids_T))
                found_T[index_T] = result_T
                setattr(batch, name, found_T)
        if "interpolation_T" in needs:
            assert stats is not None
            batch.interpolation_T = interpolation(self.policy.version - token_versions(batch, stats), self.updates)

    def _prm_reference(self, samples: list[int]) -> tuple[str, FrozenModel | None, list[int]]:
        if self.prm_reference is None:
            return "policy", self.policy, samples
        return "prm" if self.prm_reference_is_base else "prm.reference", self.prm_reference, samples

    def update_prm(self, batch: TokenBatch, stats: RolloutStats, reports: list[StepReport], step: int) -> None:
        """The process reward model's optimizer steps behind those that `reports` has, and what it says of the step's tokens
        before or after all of them, as the method chooses; nothing without one. Collective."""
        process = self.objective.process
        if self.prm is None or process is None:
            return
        if process.update == "after" and batch.prm_logprobs_T is None:
            self.annotate(batch, frozenset({"prm_logprobs_T"}))
        scored = batch.prm_logprobs_T is not None
        before_N = process.scores(batch, len(stats), self.ranks.all_reduce_sum) if scored else None
        targets_N = process.targets(stats)
        for rows_N, own in islice(divided(batch, stats, self.prm_updates), len(reports), None):
            part = replace(batch.select(own), temperature=1.0, update_tokens=int(stats.response_lengths_N[rows_N].sum()))
            loss = process.loss_of(targets_N, stats.group_N, before_N, samples=len(rows_N))
            with self.on_device("prm"):
                report = begin_train_step(self.prm, part, loss)
                report.compute()
            reports.append(report.result())
            self.guard.check(reports[-1], part, "prm", step)
        if not scored:
            self.annotate(batch, frozenset({"prm_logprobs_T"}))
        scores_N = process.scores(batch, len(stats), self.ranks.all_reduce_sum)
        if (accuracy := pair_accuracy(scores_N, targets_N, stats.group_N)) is not None:
            reports[-1] = replace(reports[-1], metrics={**reports[-1].metrics, "prm/pair_accuracy": accuracy})

    def update_critic(self, minibatches: Iterable[MiniBatch], reports: list[StepReport], step: int) -> Callable[[], None]:
        """The critic's optimizer steps behind those that `reports` has, none without a critic: when this returns they are
        taken, or on their way where it has ranks of its own. What it gives waits for them, and adds their reports."""
        if self.critic is None:
            return lambda: None
        begun: list[tuple[MiniBatch, Pass[StepReport]]] = []

        def finish() -> None:
            while begun:
                mini, one = begun.pop(0)
                report = one.result()
                self.guard.check(report, mini.batch, "critic", step)
                reports.append(replace(report, metrics=self.value_loss.finalize_metrics(report.metrics)))

        todo = islice(minibatches, len(reports), None)
        if self.ranks.is_everywhere or self.values_per_update:
            with self.on_device("critic"):
                for mini in todo:
                    if self.values_per_update:
                        self._revalue(mini)
                    begun.append((mini, self._begin_critic(mini)))
                    begun[-1][1].compute()
                    if self.ranks.is_everywhere:
                        finish()
        else:
            # All samples go there before the first of them is computed with: nobody waits for a rank that computes.
            begun += [(mini, self._begin_critic(mini)) for mini in todo]
            with self.on_device("critic"):
                for _, one in begun:
                    one.compute()
        return finish

    def _begin_critic(self, mini: MiniBatch) -> Pass[StepReport]:
        assert self.critic is not None
        return begin_train_step(self.critic, replace(mini.batch, routes_TLK=None), self.value_loss)

    def _revalue(self, mini: MiniBatch) -> None:
        """Values by the critic as it is now, and advantages over this update alone, for the policy's update too."""
        assert self.critic is not None
        part, index = mini.batch, mini.source.token_index(mini.places)
        part.values_T = self.critic.forward(replace(part, routes_TLK=None))
        self.objective.assign_advantages(part, mini.stats, self.ranks)
        for name in ("values_T", "advantages_T", "returns_T"):
            getattr(mini.source, name)[index] = getattr(part, name)

    def update_policy(self, minibatches: Iterable[MiniBatch], reports: list[StepReport], step: int) -> None:
        """The policy's optimizer steps behind those that `reports` has, which gets theirs; none while only the critic
        learns."""
        if self.critic is not None and step < self.critic_warmup:
            return
        begun: list[tuple[MiniBatch, TokenBatch, Pass[StepReport]]] = []

        def finish() -> None:
            while begun:
                mini, batch, one = begun.pop(0)
                report = one.result()
                self.guard.check(report, batch, "policy", step)
                # Of no token there is no mean.
                metrics = self.objective.finalize_metrics(report.metrics) if batch.update_tokens else {}
                reports.append(replace(report, metrics=metrics | skipped_share(mini)))

        with self.on_device("policy"):
            for mini in islice(minibatches, len(reports), None):
                seed = request_seed([self.seed, step, mini.number])
                batch = select_tokens(without_skipped(mini), self.objective, self.policy, self.ranks, seed)
                begun.append((mini, batch, begin_train_step(self.policy, batch, self.objective.loss)))
                begun[-1][2].compute()
                if self.ranks.is_everywhere:
                    finish()
        # Behind all of them: whoever has no policy may be busy with another model until then.
        finish()
