"""Packed sequences compute what they compute alone, on one rank and cut over context- and sequence-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.backend.packing import local_positions, make_packing
from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig, OptimizerConfig, PolicyConfig
from fivefold.types import LossOutput, TokenBatch
from tests.support.cluster import Together
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import VOCAB

# Of one token, shorter than the cuts, and of every remainder; some without any token to predict.
LENGTHS = [1, 2, 3, 1, 9, 17, 4, 5]
PREDICTED = [0, 1, 2, 0, 6, 0, 3, 1]
POLICY = PolicyConfig(
    dtype="float32", tokens_per_micro_batch=64, optimizer=OptimizerConfig(lr=0.0, clip_grad=0.0),
    # With the distributed optimizer a rank's gradients are reduced in its own shard only; the rest are sums of the tokens
    # that it happened to hold, which packing changes.
    megatron=MegatronConfig(ddp={"use_distributed_optimizer": False}),
)  # fmt: skip


def sequences() -> TokenBatch:
    generator = torch.Generator().manual_seed(5)
    mask = torch.cat([torch.arange(n) >= n - k for n, k in zip(LENGTHS, PREDICTED, strict=True)])
    tokens = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator)
    weights = torch.randn(sum(LENGTHS), generator=generator)
    return TokenBatch(
        tokens, mask, list(LENGTHS), temperature=1.0, update_tokens=int(mask.sum()), columns={Column.LOSS_WEIGHTS: weights}
    )


def weighted(logprobs_T, entropy_T, micro):
    loss = (micro[Column.LOSS_WEIGHTS] * (logprobs_T + 0.3 * entropy_T)).sum()
    return LossOutput(loss, {})


def losses_and_gradients(mesh, directory: Path, budget: int):
    """Loss and gradient norm of all sequences together, and of each alone; log-probs packed."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, replace(POLICY, tokens_per_micro_batch=budget), mesh, total_updates=20)
    whole = sequences()
    shard = shard_of_replica(mesh.ranks, range(len(LENGTHS)))
    packed = model.train_step(whole.select(shard), weighted)
    gradients = gradient_sum(model)
    alone = torch.zeros_like(gradients)
    loss = 0.0
    for sample in range(len(LENGTHS)):
        mine = [sample] if sample in shard else []
        report = model.train_step(whole.select(mine), weighted)
        loss += report.loss
        alone += gradient_sum(model)
    return packed.loss, loss, gradients, alone


def gradient_sum(model) -> torch.Tensor:
    """This rank's gradients after reduction, all parameters in one row."""
    return torch.cat([parameter.main_grad.flatten().clone() for ddp in model._models for parameter in ddp.parameters()])


LAYOUTS = ["d1", "t2", "c2", "t2c2", "c4", "d2c2", "p2c2"]
NAMES = ["qwen3", "deepseek_v3"]


@pytest.fixture(scope="module")
def steps(cluster, models):
    """Results by (model, layout)."""
    return Together(
        cluster,
        {
            (name, layout): (f"megatron:{layout}", losses_and_gradients, models(name), 16)
            for name in NAMES
            for layout in LAYOUTS
        },
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_one_sequence_at_a_time(steps, name, layout):
    for packed, alone, gradients, expected in steps[name, layout]:
        # Each log-prob and entropy is made of numbers near log V: a last place of each, times the weights.
        whole = sequences()
        size = float(whole[Column.LOSS_WEIGHTS][whole.loss_mask_T].abs().sum()) * 1.3 * math.log(VOCAB)
        assert packed == pytest.approx(alone, abs=size * 2**-23)
        assert (gradients - expected).abs().max() <= 2e-5 * expected.abs().max()


def logprobs_alone(mesh, directory: Path):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh)
    whole = sequences()
    alone = torch.cat([model.forward(whole.select([sample])) for sample in range(len(LENGTHS))])
    return model.forward(whole), alone


@pytest.mark.parametrize("layout", ["d1", "c2", "t2c2"])
def test_packed_logprobs_equal_those_of_each_sequence_alone(cluster, models, layout):
    for packed, alone in cluster.run(logprobs_alone, f"megatron:{layout}", models("qwen3")):
        assert (packed - alone).abs().max() <= 2e-6


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_every_position_lies_on_one_rank_and_work_is_balanced(cp):
    length = 4 * cp * 3
    held = [local_positions(length, cp, rank) for rank in range(cp)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    assert len({int(positions.sum()) for positions in held}) == 1, "a query's work grows with its position"


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_each_query_sees_the_keys_up_to_its_own_position(cp):
    """The gathered order is one rank after the other; a piece's keys are positions 0, 1, 2, ... of its sequence."""
    lengths = [8 * cp, 4 * cp, 12 * cp]
    order = torch.cat(
        [torch.cat([local_positions(n, cp, rank) + 1000 * i for i, n in enumerate(lengths)]) for rank in range(cp)]
    )
    for rank in range(cp):
        packing = make_packing(lengths, torch.device("cpu"), cp=cp, rank=rank)
        local = order.view(cp, -1)[rank]
        for bucket in packing.buckets:
            for queries, keys in zip(bucket.queries, bucket.keys, strict=True):
                seen, asking = order[keys[keys >= 0]], local[queries[queries >= 0]]
                assert seen.tolist() == list(range(int(seen[0]), int(asking[-1]) + 1))
                assert asking.tolist() == seen[-len(asking) :].tolist()
