"""The loop: weights -> engine -> groups -> batch -> advantages -> optimizer steps."""

from __future__ import annotations

from fivefold.engines.weight_sync import sleeping_after, weight_sync
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import gather_stats
from fivefold.trainer.run import Run


def train(run: Run) -> None:
    """Train from where the run stands to its last step."""
    trainer, models, engine, rollouts, ranks, plan = run.trainer, run.models, run.engine, run.rollouts, run.ranks, run.plan
    objective, minibatches, gate, stage = run.objective, run.minibatches, run.gate, run.logger.stage

    for step in trainer.steps():
        if (work := trainer.work) is None:
            with stage("weight_sync"), models.on_device(parameters_of="policy"):
                weight_sync(models.policy, engine)
            with stage("rollout"), models.on_device(), sleeping_after(engine):
                groups = rollouts.next(step)
            if groups is None:
                continue
            with stage("pack"):
                stats = gather_stats(groups, ranks, plan)
                batch = pack(groups, stats, ranks, plan)
            with stage("logprobs"):
                models.annotate(batch, objective.needs(run.updates) | gate.needs, stats)
            gate.check(batch, stats, models.policy.version)
            work = trainer.begin_updates(groups, stats, batch)
        with stage("prm"):
            models.update_prm(work.batch, work.stats, work.prm_reports, step)
        if work.batch.advantages_T is None:
            objective.assign_advantages(work.batch, work.stats, ranks)
        with stage("critic"):
            learned = models.update_critic(minibatches(work.batch, work.stats), work.critic_reports, step)
        with stage("train"):
            models.update_policy(minibatches(work.batch, work.stats), work.policy_reports, step)
            learned()
        trainer.end_updates()
