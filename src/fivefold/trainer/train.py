"""The loop: prompts -> groups -> rewards -> advantages -> optimizer steps -> new weights for the engine."""

from __future__ import annotations

from fivefold.rollout.batch import pack
from fivefold.rollout.groups import gather_stats
from fivefold.trainer.run import Run


def train(run: Run) -> None:
    """Train from where the run stands to its last step."""
    stage, policy, critic = run.logger.stage, run.policy, run.critic
    run.start()
    while run.step < run.steps:
        with run.profiled(), stage("step"):
            groups = run.collect()
            table = gather_stats(run.ranks, groups)
            batch = pack(
                groups, run.sampling.temperature, sampled=not run.given, samples_per_comparison=run.samples_per_comparison
            )
            with stage("logprobs"):
                if run.needs_old_logprobs:
                    batch.old_logprobs_T = policy.forward(batch)
                    run.check_logprobs(batch)
                if run.reference is not None:
                    batch.ref_logprobs_T = run.reference_logprobs(batch)
                if critic is not None:
                    batch.values_T = critic.forward(batch)
            scores = run.scores(table)
            batch.advantages_T, batch.returns_T = run.objective.advantages(batch, scores, table.finished_N, run)
            if critic is not None:
                with stage("critic"):
                    for update in run.updates(table):
                        run.critic_step(run.part(batch, table, update))
                    critic.offload()
            with stage("train"):
                for update in run.updates(table) if run.policy_learns else ():
                    run.train_step(run.marked(run.part(batch, table, update), update))
        run.finish_step(groups, table)
        if run.interrupted:
            return
    run.finish()
