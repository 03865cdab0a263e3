"""The loop: prompts -> groups -> rewards -> advantages -> optimizer steps -> new weights for the engine."""

from __future__ import annotations

from dataclasses import replace

from fivefold.batch import pack, spread
from fivefold.rollout import tabulate
from fivefold.run import Run


def train(run: Run) -> None:
    """Train from where the run stands to its last step."""
    stage, ranks, policy, objective = run.observer.stage, run.ranks, run.policy, run.objective
    run.start()
    while run.step < run.steps:
        step = run.step
        with run.profiled(step), stage("step"):
            prompts = run.sampler.batch(step)
            with stage("rollout"):
                groups = run.collect(prompts, step)
            with stage("reward"):
                run.score(groups)
            groups = ranks.gather_replica(groups)
            table = tabulate(ranks, groups)
            batch = pack(groups, run.sampling.temperature, sampled=run.given is None)
            with stage("logprobs"):
                if run.must_know_old_logprobs:
                    batch.old_logprobs_T = policy.forward(batch)
                    run.check_logprobs(batch)
                if run.reference is not None:
                    batch.ref_logprobs_T = run.reference_logprobs(batch)
            advantages_N = objective.advantage(table.rewards_N, table.group_N, table.response_lengths_N)
            batch.advantages_T = spread(run.own(advantages_N), batch)
            reports = []
            with stage("train"):
                for update in run.updates(table):
                    weights_N = objective.weights(table.response_lengths_N[update.samples], run.sampling.max_tokens)
                    part = replace(batch.select(update.own_samples), update_tokens=update.tokens)
                    part.loss_weights_T = spread(run.own(weights_N, update), part)
                    reports.append(run.train_step(part))
        run.finish_step(step, groups, table, reports)
        if run.interrupted:
            return
    run.finish()
