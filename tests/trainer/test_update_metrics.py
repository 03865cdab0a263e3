"""What is said of a step's updates, in closed form."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fivefold.algo.methods import KL
from fivefold.algo.objective import make_objective
from fivefold.columns import Column
from fivefold.observability.run_logger import RunLogger
from fivefold.trainer.update_metrics import throughput
from fivefold.types import TokenBatch
from tests.support.objectives import Alone


def stats(**fields):
    base = {
        "rewards_N": torch.tensor([1.0, 0.0]),
        "group_N": torch.tensor([0, 0]),
        "response_lengths_N": torch.tensor([4, 10]),
        "lengths_N": torch.tensor([6, 12]),
        "finished_N": torch.tensor([True, True]),
        "max_response_tokens": 10,
        "expert_N": None,
        "trajectory_N": None,
        "turns": None,
    }
    numbers = SimpleNamespace(**base | fields)
    numbers.trajectories = numbers
    return numbers


def test_tokens_of_a_step_count_once_and_trained_ones_in_each_epoch():
    reports = [SimpleNamespace(tokens=18, sequences=2)] * 3
    numbers = SimpleNamespace(lengths_N=torch.tensor([6, 12]), trajectories=[0, 1])
    rates = throughput(numbers, reports, {"step": 4.0, "train": 2.0}, 8.0, 2)
    assert rates["throughput/tokens_per_second"] == 18 / 4
    assert rates["throughput/samples_per_second"] == 2 / 4
    assert rates["throughput/train_tokens_per_second"] == 3 * 18 / 2
    assert rates["throughput/tflops_per_gpu"] == 8 / 2 / 2


def test_a_step_without_an_update_leaves_the_kl_coefficient_as_it_is():
    objective = make_objective("grpo", kl=KL(coef=0.2, target=0.1))
    assert objective.kl.adapted(0.2, math.nan, 8) == 0.2
    assert objective.kl.adapted(0.2, 0.3, 8) == pytest.approx(0.2 * (1 + 0.2 * 8 / objective.kl.horizon))


def test_the_greedy_reward_is_shaped_as_those_that_are_compared_with_it():
    """A buffer of 5 of 10 tokens: a response of 10 loses 1, one of 8 loses 0.6; then rewards are cut to ±0.5."""
    objective = make_objective("remax", overlong_buffer=5, overlong_penalty=1.0, reward_clip=0.5)
    numbers = stats(greedy_rewards_N=torch.tensor([1.0, 1.0]), greedy_lengths_N=torch.tensor([8, 8]))
    batch = TokenBatch(
        token_ids_T=torch.zeros(18, dtype=torch.long),
        loss_mask_T=torch.tensor([False] * 2 + [True] * 4 + [False] * 2 + [True] * 10),
        lengths_N=[6, 12],
    )
    objective.assign_advantages(batch, numbers, Alone())
    expected = torch.tensor([0.5, -0.5]) - torch.tensor([0.4, 0.4])
    assert torch.allclose(batch[Column.ADVANTAGES][[2, 8]], expected)


def test_the_mean_of_a_micro_batch_leaves_out_what_the_overlong_filter_leaves_out():
    objective = make_objective("grpo", aggregate="micro-batch-token-mean", overlong_filter=True)
    weights_N = objective.loss_weights(torch.tensor([4, 10]), 10, torch.tensor([True, False]))
    batch = TokenBatch(
        token_ids_T=torch.zeros(18, dtype=torch.long),
        loss_mask_T=torch.tensor([False] * 2 + [True] * 4 + [False] * 2 + [True] * 10),
        lengths_N=[6, 12],
        per_micro_batch=True,
        update_micro_batches=3,
    )
    batch[Column.LOSS_WEIGHTS] = batch.expand_to_tokens(weights_N)
    assert torch.allclose(batch.weights_T[2:6], torch.full((4,), 1 / 4 / 3))
    assert float(batch.weights_T.sum()) == pytest.approx(1 / 3)


def test_a_stage_ends_when_the_device_has_done_what_it_was_given(tmp_path):
    done: list[str] = []
    logger = RunLogger(tmp_path, [], is_main=False, steps=1, settle=lambda: done.append("settled"))
    with logger.stage("rollout"):
        done.append("rollout")
    with logger.stage("train"):
        done.append("train")
    assert done == ["rollout", "settled", "train", "settled"]
