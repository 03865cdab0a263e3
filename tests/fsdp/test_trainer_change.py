"""Checkpoints across the two trainers: two updates on one and two on the other are four updates on one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.learners import PolicyConfig
from tests.support.fsdp import policy_of
from tests.support.shards import shard_of_replica
from tests.support.two_steps import LENGTHS, OBJECTIVE, assert_equal, expected, whole_batch


def updates(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor, count: int, start: Path | None, end: Path):
    """Reports of `count` updates and the weights after them, from the checkpoint `start`, saved at `end`."""
    options = {"total_updates": 4, "read_weights": start is None}
    if mesh.layout.backend == "fsdp":
        from fivefold.fsdp.mesh import build_mesh
        from fivefold.fsdp.model import FSDPModel

        mesh = build_mesh(mesh.ranks, mesh.device, policy.fsdp.replicas)
        model = FSDPModel(directory, policy, mesh, **options)
    else:
        from fivefold.megatron.model import MegatronModel

        model = MegatronModel(directory, policy, mesh, **options)
    if start is not None:
        model.load(start)
        assert model.version == 2
    batch = whole_batch()
    batch = batch.with_columns(
        {Column.OLD_LOGPROBS: base_T + batch[Column.OLD_LOGPROBS], Column.REF_LOGPROBS: base_T + batch[Column.REF_LOGPROBS]}
    )
    mine = batch.select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(count)]
    if mesh.ranks.is_main:
        end.mkdir()
    mesh.ranks.barrier()
    model.save(end)
    return reports, {name: tensor.clone() for name, tensor in model.weights()}


def both_ways(cluster, directory: Path, root: Path, policy: PolicyConfig, first: str, second: str):
    """Results of two updates on one trainer and two on the other, and of four on the first.

    All four losses give the scale: later ones come close to 0, and sum the same errors.
    """
    base_T = expected(directory)[2]
    (whole, weights), *_ = cluster.run(updates, first, directory, policy, base_T, 4, None, root / "whole")
    (begun, _), *_ = cluster.run(updates, first, directory, policy, base_T, 2, None, root / "half")
    results = cluster.run(updates, second, directory, policy, base_T, 2, root / "half", root / "end")
    joined = [(begun + ended, state) for ended, state in results]
    return joined, ([(report.loss, report.grad_norm) for report in whole], weights, None)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("qwen3", "megatron:d2t2", "fsdp:d2"),
        ("qwen3", "fsdp:d2", "megatron:d1p2t2"),
        ("qwen2_tied", "megatron:d1p2", "fsdp:c2"),
        ("qwen2_tied", "fsdp:d1t2", "megatron:d2"),
        ("glm4_moe", "megatron:d2e2", "fsdp:d2"),
        ("glm4_moe", "fsdp:d2", "megatron:(attn:d1t2|ffn:e2)"),
        pytest.param("qwen3_moe", "megatron:d2", "fsdp:d4", marks=pytest.mark.fsdp),
        pytest.param("qwen3_moe", "fsdp:d4", "megatron:d2e2", marks=pytest.mark.fsdp),
        pytest.param("qwen3_moe", "megatron:d2", "fsdp:d2e2", marks=pytest.mark.fsdp),
        pytest.param("qwen3_moe", "fsdp:d2e2", "megatron:d1p2", marks=pytest.mark.fsdp),
        pytest.param("mixtral", "megatron:d2e2", "fsdp:d2", marks=pytest.mark.fsdp),
        pytest.param("mixtral", "fsdp:c2", "megatron:d2", marks=pytest.mark.fsdp),
        pytest.param("deepseek_v3", "megatron:d1p2", "fsdp:d2", marks=pytest.mark.fsdp),
        pytest.param("deepseek_v3", "fsdp:d2", "megatron:d2e2", marks=pytest.mark.fsdp),
        pytest.param("qwen2_moe", "megatron:d2", "fsdp:d2", marks=pytest.mark.fsdp),
        pytest.param("qwen2_moe", "fsdp:d2", "megatron:d2", marks=pytest.mark.fsdp),
    ],
)
def test_two_updates_on_each_trainer_are_four_on_one(cluster, models, tmp_path, name, first, second):
    """Moments, step counts, joined queries, keys and values, stacked experts, biases of routers, a padded vocabulary."""
    assert_equal(*both_ways(cluster, models(name), tmp_path, policy_of("d2"), first, second))


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint in full, by its stored name."""
    from fivefold.backend.sharded_files import Box, PieceReader

    reader, tensors = PieceReader(directory), {}
    for name, pieces in reader._stored.items():
        ends = [[a + n for a, n in zip(piece.box.offset, piece.box.size, strict=True)] for piece in pieces]
        shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])
        tensors[name] = torch.full(shape, torch.nan, dtype=pieces[0].dtype)
        reader.fill(name, Box((0,) * len(shape), shape), tensors[name])
    return tensors


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", "bfloat16"), pytest.param("deepseek_v3", "float32", marks=pytest.mark.fsdp)]
)
def test_a_checkpoint_that_went_through_the_other_trainer_has_the_same_bits(cluster, models, tmp_path, name, dtype):
    """In bfloat16 the float32 copies of Megatron-Core's optimizer are the parameters of `fsdp:`, and come back."""
    policy, base_T = policy_of("d2", dtype=dtype), expected(models(name))[2]
    cluster.run(updates, "megatron:d2", models(name), policy, base_T, 2, None, tmp_path / "first")
    cluster.run(updates, "fsdp:d2", models(name), policy, base_T, 0, tmp_path / "first", tmp_path / "between")
    cluster.run(updates, "megatron:d2", models(name), policy, base_T, 0, tmp_path / "between", tmp_path / "last")
    first, between, last = (stored(tmp_path / place) for place in ("first", "between", "last"))
    assert set(first) == set(last) and not set(first) & set(between)
    assert all(torch.equal(tensor, last[key]) for key, tensor in first.items())
    assert any(key.endswith(".param") for key in first) == (dtype == "bfloat16")
    assert {tensor.dtype for tensor in between.values()} == {torch.float32}
