"""What the optimal token baseline asks of the policy: the log-probs of the tokens at half the temperature of sampling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.algo.methods import Choices
from fivefold.columns import Column
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import gather_stats
from tests.support.toy import ToyModel, toy_parts


def squares(mesh, run_dir: Path, temperature: float):
    """(Σπ² as the objective has it, Σπ² of the table's distributions) of the response tokens of a step."""
    policy = ToyModel()
    policy.table.data += torch.randn(policy.table.shape, generator=torch.Generator().manual_seed(5))
    run = toy_parts(mesh, run_dir, "otb", Choices(), policy, 1)
    run.engine.update_weights(run.models.policy.weights(), 0)
    groups = run.rollouts.next(0)
    stats = gather_stats(groups, mesh.ranks, run.plan)
    batch = pack(groups, stats, mesh.ranks, run.plan)
    batch.temperature = temperature
    run.models.annotate(batch, run.objective.needs(1), stats)
    squares_T = (2 * batch[Column.OLD_LOGPROBS] - batch[Column.HALF_TEMPERATURE_LOGPROBS]).exp()
    place_T = batch.positions_T
    prompt_T = batch.token_ids_T[torch.arange(len(place_T)) - place_T]
    chances_TV = (policy.table.detach()[prompt_T, (place_T - 1).clamp(min=0)] / temperature).softmax(-1)
    run.objective.assign_advantages(batch, stats, mesh.ranks)
    assert Column.HALF_TEMPERATURE_LOGPROBS not in batch
    mask_T = batch.loss_mask_T
    return squares_T[mask_T].tolist(), chances_TV.square().sum(-1)[mask_T].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_two_passes_of_the_policy_give_the_sum_of_its_squared_probabilities(cluster, tmp_path, temperature):
    ((values, expected),) = cluster.run(squares, "megatron:d1", tmp_path, temperature)
    assert len(values) > 50
    assert values == pytest.approx(expected, rel=1e-5)
