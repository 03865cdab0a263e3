"""Metrics that a step records of its samples, and the KL coefficient of the next step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.algo import methods
from fivefold.algo.objective import make_objective
from fivefold.algo.term import Progress
from fivefold.columns import Column
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, gather_stats
from fivefold.trainer.learners import ProcessRewardLearner
from fivefold.trainer.models import Models
from fivefold.trainer.step_work import StepWork
from fivefold.types import Group, Prompt, Sample, StepReport, Turn
from tests.support.toy import ToyModel, toy_parts

PROMPT = [1, 2]


def groups_of(sequences: int = 1, has_logprobs: bool = True) -> list[Group]:
    """Four trajectories of so many sequences each, with the rewards 0, 1, 0, 1."""
    samples = [
        Sample(
            [3, 4], [-0.1] * 2 if has_logprobs else [], "x", "answered", 0, reward=float(number % 2),
            correct=bool(number % 2), prompt_ids=PROMPT * (1 + turn), trajectory=number, turns=(Turn(turn, 0, 2),),
        )
        for number in range(4)
        for turn in range(sequences)
    ]  # fmt: skip
    return [Group(Prompt(0, PROMPT, "s", "", ""), samples, index=0)]


def step_of(mesh, groups: list[Group]) -> StepWork:
    plan = BatchPlan(max_response_tokens=8)
    stats = gather_stats(groups, mesh.ranks, plan)
    return StepWork(stats, pack(groups, stats, mesh.ranks, plan), [])


def recorded(mesh, run_dir: Path, groups: list[Group]):
    """(names of the step's metrics, KL coefficient after it) of a step whose KL is far above the target."""
    choices = methods.Choices(kl=methods.KL(coef=0.1, target=0.1, horizon=100))
    run = toy_parts(mesh, run_dir, "grpo", choices, ToyModel(), 1)
    done = step_of(mesh, groups)
    metrics = {"policy/kl_reference": 0.5}
    done.reports["policy"] = [StepReport(0.0, 1.0, 1e-3, metrics, micro_batches=1, tokens=8, sequences=4)]
    run.trainer._record_metrics(done)
    return sorted(run.logger.pending), run.trainer._kl_coef


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_kl_coefficient_adapts_by_the_number_of_trajectories(cluster, tmp_path, sequences):
    """1909.08593, section 2.2: 0.1 (1 + 0.2 · 4 / 100)."""
    ((_, coef),) = cluster.run(recorded, "megatron:d1", tmp_path, groups_of(sequences))
    assert coef == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))


def test_a_step_without_log_probs_of_the_engine_has_its_metrics_of_rewards(cluster, tmp_path):
    """As nine of ten steps with engine.logprobs: tenth_step."""
    ((names, _),) = cluster.run(recorded, "megatron:d1", tmp_path / "0", groups_of(has_logprobs=False))
    ((expected, _),) = cluster.run(recorded, "megatron:d1", tmp_path / "1", groups_of())
    assert names == expected and {"reward/mean", "reward/pass@4", "rollout/staleness_mean"} <= set(names)


def test_a_process_reward_model_learns_without_the_routes_of_the_policy(cluster):
    """It has been scored with its own."""
    assert cluster.run(columns_of_an_update, "megatron:d1") == [[]]


def columns_of_an_update(mesh) -> list[str]:
    work = step_of(mesh, groups_of())
    work.batch[Column.ROUTES] = torch.zeros(len(work.batch.token_ids_T), 1, 1, dtype=torch.int8)
    learner = ProcessRewardLearner(make_objective("prime").process, mesh.ranks, "prm")
    update = next(learner.updates(Models({}, mesh.ranks, None, {}), work, Progress()))
    return [column.name for column in update.batch.columns if column is Column.ROUTES]
