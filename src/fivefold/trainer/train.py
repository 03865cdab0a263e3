"""The training loop: weights -> engine -> groups -> batch -> advantages -> optimizer steps."""

from __future__ import annotations

from functools import partial

from fivefold.columns import Column
from fivefold.config.roles import Learns
from fivefold.engines.weight_sync import sleeping_after
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import gather_stats
from fivefold.trainer.run import Run


def train(run: Run) -> None:
    """Train from the current step of the run to its last."""
    trainer, models, engine, rollouts, ranks, plan = run.trainer, run.models, run.engine, run.rollouts, run.ranks, run.plan
    objective, gate, stage = run.objective, run.gate, run.logger.stage

    for step in trainer.steps():
        if (work := trainer.work) is None:
            gate.probe(models)
            with stage("weight_sync"):
                models.sync(engine)
            with stage("rollout"), models.away(), sleeping_after(engine):
                groups = rollouts.next(step)
            if groups is None:
                continue
            with stage("pack"):
                stats = gather_stats(groups, ranks, plan)
                batch = pack(groups, stats, ranks, plan)
            with stage("logprobs"):
                models.annotate(batch, objective.needs(run.updates) | gate.needs, stats)
            gate.check(batch, stats, models)
            work = trainer.begin_updates(groups, stats, batch)
        models.update(Learns.BEFORE_ADVANTAGES, work, trainer.progress)
        if Column.ADVANTAGES not in work.batch:
            objective.assign_advantages(work.batch, work.stats, ranks, trainer.progress)
        models.update(Learns.WITH_POLICY, work, trainer.progress)
        trainer.end_updates()
        with stage("weight_sync"):
            rollouts.begin(step + 1, partial(models.sync, engine))
