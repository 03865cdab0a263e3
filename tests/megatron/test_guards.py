"""What watches every run: copies that must be equal, numbers that must be finite, state that leaves and comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.backend.offload import HostCopy
from fivefold.config.learners import MegatronConfig, OffloadConfig
from fivefold.types import LossOutput
from tests.support.cluster import Together
from tests.support.shards import shard_of_replica
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, ROUTER, whole_batch


def model_and_batch(mesh, directory: Path, policy=POLICY):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=4)
    return model, whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))


def verify_after_harm(mesh, directory: Path, part: str, rank: int):
    """The guard's message after one bit of one rank's copy changed, and before."""
    from fivefold.megatron.chunks import named_weights

    model, _ = model_and_batch(mesh, directory)
    model.verify()
    if mesh.ranks.rank == rank:
        for name, tensor in named_weights(model._chunks).items():
            if part in name:
                flat = tensor.detach().view(-1)
                flat[0] = torch.nextafter(flat[0], flat[0] + 1)
                break
    try:
        model.verify()
    except RuntimeError as error:
        return str(error)
    return "nothing was seen"


@pytest.mark.parametrize(
    ("layout", "name", "part", "rank", "kind"),
    [
        ("d2", "qwen3", "linear_fc1", 1, "data-parallel replicas"),
        ("c2", "qwen3", "linear_qkv", 1, "data-parallel replicas"),
        ("t2", "qwen3", "input_layernorm", 1, "tensor-parallel duplicates"),
        ("t2e2", "qwen3_moe", "router.weight", 0, "tensor-parallel duplicates"),
        ("t2e2", "deepseek_v3", "expert_bias", 1, "tensor-parallel duplicates"),
        ("d2e2", "deepseek_v3", "expert_bias", 1, "data-parallel replicas"),
        ("d4e2", "qwen3_moe", "experts", 3, "expert replicas"),
        ("p2", "qwen3_tied", "embedding", 0, "tied embedding"),
    ],
)
def test_one_changed_bit_of_one_copy_is_seen_and_named(cluster, models, layout, name, part, rank, kind):
    for message in cluster.run(verify_after_harm, f"megatron:{layout}", models(name), part, rank):
        assert "must be equal differ" in message and kind in message
        assert kind == "tied embedding" or part.split(".")[0] in message
        assert str(rank) in message


def drift(mesh, directory: Path):
    """Steps in which tensor-parallel copies of the norms see different gradients, as without their reduction."""
    import sys

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    module._allreduce_non_tensor_model_parallel_grads = lambda *args, **kwargs: None
    model, batch = model_and_batch(mesh, directory)
    model.train_step(batch, OBJECTIVE.loss)
    try:
        model.verify()
    except RuntimeError as error:
        return str(error)
    return "nothing was seen"


def test_norms_that_drift_apart_are_seen_after_one_step(cluster, models):
    for message in cluster.run(drift, "megatron:t2", models("qwen3")):
        assert "layernorm" in message and "tensor-parallel duplicates" in message


def not_a_number(logprobs_T, entropy_T, micro):
    return LossOutput(logprobs_T.sum() * torch.nan, {})


def skip_and_go_on(mesh, directory: Path):
    policy = replace(POLICY, megatron=MegatronConfig(transformer=ROUTER))
    model, batch = model_and_batch(mesh, directory, policy)
    before = {name: tensor.clone() for name, tensor in model.weights()}
    bad = model.train_step(batch, not_a_number)
    after = {name: tensor.clone() for name, tensor in model.weights()}
    same = all(torch.equal(before[name], after[name]) for name in before)
    version = model.version
    good = model.train_step(batch, OBJECTIVE.loss)
    return bad.skipped, same, version, good.skipped, model.version, good.grad_norm


@pytest.mark.parametrize("layout", ["d1", "d2e2", "t2p2"])
def test_an_update_that_is_not_finite_changes_nothing_and_the_next_one_works(cluster, models, layout):
    for bad, same, version, good, after, norm in cluster.run(skip_and_go_on, f"megatron:{layout}", models("deepseek_v3")):
        assert bad and same and version == 0
        assert not good and after == 1 and norm > 0


def offload_one(mesh, directory: Path, part: str):
    """Bytes that left, and bytes of each part's tensors while they were away."""
    model, batch = model_and_batch(mesh, directory, replace(POLICY, dtype="bfloat16", offload=OffloadConfig(**{part: True})))
    model.train_step(batch, OBJECTIVE.loss)
    tensors = {name: model._offload._tensors(name) for name in ("parameters", "gradients", "optimizer")}
    moved = model.offload()
    return moved, {
        name: sum(t.untyped_storage().nbytes() for t in tensors_of_part) for name, tensors_of_part in tensors.items()
    }


def offload_all_but_parameters(mesh, directory: Path):
    settings = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    model, batch = model_and_batch(mesh, directory, replace(POLICY, dtype="bfloat16", offload=settings))
    model.train_step(batch, OBJECTIVE.loss)
    first, then = model.offload(parameters=False), model.offload()
    return set(first), set(then)


def test_parameters_leave_later_where_the_engine_waits_for_them(cluster, models):
    ((first, then),) = cluster.run(offload_all_but_parameters, "megatron:d1", models("qwen3"))
    assert first == {"gradients", "optimizer"} and then == {"parameters"}


@pytest.mark.parametrize("part", ["parameters", "gradients", "optimizer"])
def test_each_part_leaves_by_a_key_of_its_own(cluster, models, part):
    ((moved, left),) = cluster.run(offload_one, "megatron:d1", models("qwen3"), part)
    assert set(moved) == {part} and moved[part] > 0
    assert {name for name, size in left.items() if size == 0} == {part}


def offload_between_steps(mesh, directory: Path, dtype: str, away: bool):
    settings = OffloadConfig(parameters=True, gradients=True, optimizer=True, bucket_mb=1)
    model, batch = model_and_batch(mesh, directory, replace(POLICY, dtype=dtype, offload=settings))
    losses, moved, capacities = [], {}, []
    for _ in range(3):
        if away:
            moved = model.offload()
            sizes = [parameter.untyped_storage().nbytes() for chunk in model._chunks for parameter in chunk.parameters()]
            assert sum(sizes) == 0
            capacities.append({name: part.capacity for name, part in model._offload._parts.items()})
            # Before the first step, when Adam has no moments yet.
            model.prepare_offload()
        losses.append(model.train_step(batch, OBJECTIVE.loss).loss)
    model.offload()
    weights = {name: tensor.clone() for name, tensor in model.weights()}
    model.onload()
    return losses, weights, moved, capacities


OFFLOAD_LAYOUTS, DTYPES = ["d1", "d2", "d2e2", "t2p2"], ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def offloaded(cluster, models):
    """Results by (layout, dtype, whether state left between steps)."""
    return Together(
        cluster,
        {
            (layout, dtype, away): (f"megatron:{layout}", offload_between_steps, models("qwen3_moe"), dtype, away)
            for layout in OFFLOAD_LAYOUTS
            for dtype in DTYPES
            for away in (False, True)
        },
    )


@pytest.mark.parametrize("layout", OFFLOAD_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_that_left_comes_back_bit_for_bit(offloaded, layout, dtype):
    stayed, left = offloaded[layout, dtype, False], offloaded[layout, dtype, True]
    for (losses, weights, *_), (losses_away, weights_away, moved, _) in zip(stayed, left, strict=True):
        assert losses == losses_away
        assert all(torch.equal(weights[name], weights_away[name]) for name in weights)
        assert set(moved) == {"parameters", "gradients", "optimizer"} and all(moved.values())


@pytest.mark.parametrize("layout", OFFLOAD_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_host_memory_is_prepared_with_that_of_moments_to_come(offloaded, layout, dtype):
    """So the offload after the first update allocates nothing, and nothing is allocated in vain."""
    for _, _, moved, (before, first, then) in offloaded[layout, dtype, True]:
        assert first == then and first["parameters"] == before["parameters"]
        assert first["optimizer"] >= 3 * before["optimizer"] and first["gradients"] == 0
        assert moved["optimizer"] <= first["optimizer"] < 1.05 * moved["optimizer"]


def prepared_for_bfloat16_moments(mesh, directory: Path):
    """Bytes that were prepared before the first update, and those that leave after it."""
    options = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    policy = replace(
        POLICY, dtype="bfloat16", offload=OffloadConfig(optimizer=True), megatron=MegatronConfig(optimizer=options)
    )
    model, batch = model_and_batch(mesh, directory, policy)
    model.offload()
    model.prepare_offload()
    prepared = model._offload._parts["optimizer"].capacity
    model.train_step(batch, OBJECTIVE.loss)
    return prepared, model.offload()["optimizer"], model._offload._parts["optimizer"].capacity


def test_host_memory_is_prepared_in_the_dtypes_of_moments(cluster, models):
    for prepared, left, then in cluster.run(prepared_for_bfloat16_moments, "megatron:d2", models("qwen3")):
        assert left <= prepared == then < 1.05 * left


def test_only_what_is_named_leaves():
    from fivefold.backend.offload import Offload

    kept, away = torch.arange(10.0), torch.arange(10.0)
    part = HostCopy(torch.device("cpu"), 1)
    assert part.offload([away]) == 40
    assert away.untyped_storage().nbytes() == 0 and kept.untyped_storage().nbytes() == 40
    part.onload()
    assert torch.equal(away, kept)
    assert Offload(OffloadConfig(), torch.device("cpu"), lambda part: [], list).leaving() == []
