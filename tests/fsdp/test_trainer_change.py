"""Checkpoints across the two trainers: two updates on one and two on the other are four updates on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.learners import PolicyConfig
from tests.support.fsdp import policy_of
from tests.support.shards import shard_of_replica
from tests.support.two_steps import BOUNDS, LENGTHS, OBJECTIVE, assert_equal, difference, expected, whole_batch


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


def both_ways(cluster, directory: Path, root: Path, policy: PolicyConfig, first: str, second: str, fault: str = ""):
    """Results of two updates on one trainer and two on the other, and of four on the first; the other reads with a fault.

    All four losses give the scale: later ones come close to 0, and sum the same errors.
    """
    base_T = expected(directory)[2]
    (whole, weights), *_ = cluster.run(updates, first, directory, policy, base_T, 4, None, root / "whole")
    (begun, _), *_ = cluster.run(updates, first, directory, policy, base_T, 2, None, root / "half")
    results = cluster.run(reads_with, second, fault, directory, policy, base_T, 2, root / "half", root / "end")
    joined = [(begun + ended, state) for ended, state in results]
    return joined, ([(report.loss, report.grad_norm) for report in whole], weights, None)


def reads_with(mesh, fault: str, *arguments):
    """`updates` on a rank that reads the other trainer's checkpoint with one of these faults, or none."""
    from fivefold.backend.checkpoint_names import MOMENTS, CheckpointReader
    from fivefold.fsdp.updater import Updater
    from fivefold.megatron import dist_checkpoint

    fill, named, load = CheckpointReader.fill, CheckpointReader._stored_as, dist_checkpoint._load_optimizer

    def rounded(self, name, box, values):
        fill(self, name, box, values)
        if name.endswith(".param") or (mesh.layout.backend == "fsdp" and not name.endswith(MOMENTS)):
            values.copy_(values.bfloat16())

    def zero(self, name, box, values):
        fill(self, name, box, values)
        if name.endswith(MOMENTS):
            values.zero_()

    def exchanged(self, other, kind):
        return named(self, other, {MOMENTS[0]: MOMENTS[1], MOMENTS[1]: MOMENTS[0]}.get(kind, kind))

    if fault == "masters are lost":
        CheckpointReader.fill = rounded
    elif fault == "moments are lost":
        CheckpointReader.fill = zero
    elif fault == "moments are exchanged":
        CheckpointReader._stored_as = exchanged
    elif fault == "steps are lost":
        Updater.set_steps = lambda self, steps: None
        dist_checkpoint._load_optimizer = lambda *given: load(*given[:-1], 0.0)
    return updates(mesh, *arguments)


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


@pytest.mark.fsdp
@pytest.mark.parametrize("fault", ["moments are lost", "moments are exchanged", "steps are lost"])
@pytest.mark.parametrize(("first", "second"), [("megatron:d2", "fsdp:d2"), ("fsdp:d2", "megatron:d2")])
def test_a_fault_in_what_the_other_trainer_reads_is_seen(cluster, models, tmp_path, first, second, fault):
    differences = difference(*both_ways(cluster, models("qwen3"), tmp_path, policy_of("d2"), first, second, fault))
    assert any(value > 10 * bound for value, bound in zip(differences, BOUNDS, strict=True)), differences


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


def there_and_back(cluster, directory: Path, root: Path, dtype: str, faults: Sequence[str] = ("", "")):
    """The tensors of a checkpoint of Megatron-Core, and as `fsdp:` and then Megatron-Core have read and saved them."""
    policy, base_T = policy_of("d2", dtype=dtype), expected(directory)[2]
    cluster.run(updates, "megatron:d2", directory, policy, base_T, 2, None, root / "first")
    for layout, fault, start, end in zip(
        ("fsdp:d2", "megatron:d2"), faults, ("first", "between"), ("between", "last"), strict=True
    ):
        cluster.run(reads_with, layout, fault, directory, policy, base_T, 0, root / start, root / end)
    return [stored(root / place) for place in ("first", "between", "last")]


@pytest.mark.fsdp
@pytest.mark.parametrize("faults", [("masters are lost", ""), ("", "masters are lost")])
def test_float32_copies_that_the_other_trainer_loses_are_seen(cluster, models, tmp_path, faults):
    """Lost copies change only what 16 bits cannot hold: the weights that Megatron-Core computes with stay the same."""
    first, _, last = there_and_back(cluster, models("qwen3"), tmp_path, "bfloat16", faults)
    lost = {key for key, tensor in first.items() if not torch.equal(tensor, last[key])}
    assert lost == {key for key in first if key.endswith(".param") and not torch.equal(first[key], first[key].bfloat16())}


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", "bfloat16"), pytest.param("deepseek_v3", "float32", marks=pytest.mark.fsdp)]
)
def test_a_checkpoint_that_went_through_the_other_trainer_has_the_same_bits(cluster, models, tmp_path, name, dtype):
    """In bfloat16 the float32 copies of Megatron-Core's optimizer are the parameters of `fsdp:`, and come back."""
    first, between, last = there_and_back(cluster, models(name), tmp_path, dtype)
    assert set(first) == set(last) and not set(first) & set(between)
    assert all(torch.equal(tensor, last[key]) for key, tensor in first.items())
    assert any(key.endswith(".param") for key in first) == (dtype == "bfloat16")
    assert {tensor.dtype for tensor in between.values()} == {torch.float32}
