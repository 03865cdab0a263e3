"""What GPUs do with a model next to its step: experts in one kernel, state that leaves for the host, deterministic runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.learners import OffloadConfig
from tests.support.cluster import Together
from tests.support.gpu_models import build, finite, is_large, layer_of_experts, random_batch, same_bits, synchronize
from tests.support.two_steps import OBJECTIVE

pytestmark = pytest.mark.gpu


def experts_in_both_forms(mesh) -> dict[str, Any]:
    """Relative differences of output and gradients, and of the grouped output from float32."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from fivefold.megatron.layers.moe import GroupedExperts

    config, experts, x, counts, weights = layer_of_experts(mesh)
    seed = torch.randn(x.shape, generator=torch.Generator(mesh.device).manual_seed(4), device=mesh.device).to(x.dtype)
    tensors_of = {}
    for grouped in (True, False):
        config.moe_grouped_gemm = grouped
        for tensor in (x, weights, *experts.parameters()):
            tensor.grad = None
        output, _ = experts(x, counts, weights)
        output.backward(seed)
        tensors = (output.detach(), x.grad, weights.grad, *(parameter.grad for parameter in experts.parameters()))
        tensors_of[grouped] = [tensor.float() for tensor in tensors]
    config.params_dtype = torch.float32
    with mesh.active():
        exact = GroupedExperts(len(counts), config, get_default_pg_collection()).to(mesh.device)
    with torch.no_grad():
        for target, source in zip(exact.parameters(), experts.parameters(), strict=True):
            target.copy_(source)
        reference, _ = exact(x.float(), counts, weights)
    return {
        "differences": [float((a - b).norm() / b.norm()) for a, b in zip(tensors_of[True], tensors_of[False], strict=True)],
        "rounding": float((tensors_of[True][0] - reference).norm() / reference.norm()),
        "empty": float(experts.fc1.grad[5].abs().max()),
    }


def offloaded(mesh, directory: Path) -> dict[str, Any]:
    """Bytes named and freed when a model's state leaves a second time, whether it came back as it was, and the next loss."""
    settings = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    model = build(mesh, directory, "bfloat16", 4096 if is_large(mesh) else 64, offload=settings)
    batch = random_batch(8, 512 if is_large(mesh) else 24, model.spec.vocab)
    model.train_step(batch, OBJECTIVE.loss)

    def state() -> list[torch.Tensor]:
        return [tensor for name in ("parameters", "optimizer") for tensor in model._offload._tensors(name)]

    before = [tensor.to("cpu", copy=True) for tensor in state()]
    for _ in range(2):
        held = torch.cuda.memory_allocated() if is_large(mesh) else 0
        named = sum(model.offload().values())
        synchronize(mesh)
        freed = held - torch.cuda.memory_allocated() if is_large(mesh) else named
        model.onload()
    exact = all(torch.equal(old, new.cpu()) for old, new in zip(before, state(), strict=True))
    return {"named": named, "freed": freed, "exact": exact, "loss": model.train_step(batch, OBJECTIVE.loss).loss}


@pytest.fixture(scope="module")
def alone(gpus, gpu_models):
    return Together(
        gpus,
        {
            experts_in_both_forms: ("megatron:d1", experts_in_both_forms),
            offloaded: ("megatron:d1", offloaded, gpu_models["qwen3_moe"]),
        },
    )


def test_grouped_experts_equal_sequential_ones(alone):
    (numbers,) = alone[experts_in_both_forms]
    print(numbers)
    # bfloat16 sums of 2048 products in another order: 2^-9 of the size of the result.
    assert max(map(finite, numbers["differences"])) <= 4e-3
    # What rounding to bfloat16 does, so that a difference of 0 between the two forms is not mistaken for no comparison.
    assert numbers["rounding"] <= 1e-2
    assert numbers["empty"] == 0.0, "an expert without tokens has no gradient"


def test_offload_frees_what_it_names_and_brings_it_back_bit_for_bit(alone):
    (numbers,) = alone[offloaded]
    print(numbers)
    assert numbers["named"] > 0
    assert numbers["freed"] >= 0.95 * numbers["named"]
    assert numbers["exact"]
    assert math.isfinite(numbers["loss"])


@pytest.fixture(scope="module")
def twice(gpus, gpu_models):
    return Together(gpus, {name: ("megatron:d2", same_bits, gpu_models[name], True) for name in ("qwen3", "qwen3_moe")})


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_deterministic_runs_give_the_same_bits(twice, name):
    """Losses, norms and parameters of three steps; benchmarks/training_speed.py tells what that costs."""
    for same, _ in twice[name]:
        assert same
