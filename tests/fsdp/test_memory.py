"""Bytes of parameters, gradients and moments on every rank of an `fsdp:` layout, and what `check` estimates."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.learners import FSDPConfig, PolicyConfig
from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec, spec_from_config
from fivefold.plan.memory import Sharded
from tests.fsdp.test_model import model_on
from tests.support.fsdp import policy_of
from tests.support.public_shapes import SHAPES
from tests.support.shards import shard_of_replica
from tests.support.two_steps import LENGTHS, OBJECTIVE, whole_batch


def held(mesh, directory: Path, policy: PolicyConfig):
    """(parameters, gradients, moments) in bytes on this rank, and the largest gathered gradient."""
    from fivefold.fsdp import step

    model = model_on(mesh, directory, policy)
    gradients, original = [], step.finish_gradients

    def measured(tensors, mesh_of_step):
        reduced = original(tensors, mesh_of_step)
        gradients.append(sum(grad.nbytes for _, grad in reduced))
        return reduced

    step.finish_gradients = measured
    model.train_step(whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS)))), OBJECTIVE.loss)
    parameters = sum(tensor.values.nbytes for tensor in model._tensors)
    return parameters, gradients[0], sum(tensor.nbytes for tensor in model._updater.state_tensors())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3", "d2"),
        ("qwen2_tied", "d2c2"),
        ("qwen3", "d2t2"),
        pytest.param("qwen3_moe", "d4", marks=pytest.mark.fsdp),
        pytest.param("gemma2", "d4 replicas", marks=pytest.mark.fsdp),
    ],
)
def test_check_estimates_the_bytes_of_parameters_gradients_and_moments(cluster, models, name, layout):
    directory, policy = models(name), policy_of(layout)
    shape = ParallelLayout.parse(f"fsdp:{layout.split()[0]}")
    model = Sharded(load_spec(directory), shape, tokens_per_micro_batch=32, kernels=False, fsdp=policy.fsdp)
    (estimate,) = model.held(4)
    ranks = cluster.run(held, str(shape), directory, policy)
    fullest = [max(rank[kind] for rank in ranks) for kind in range(3)]
    # The fullest rank has a row more of some tensors; norms are whole on every rank of t, some in a hundred of a tiny model.
    for measured, bytes_ in zip(fullest, (estimate.parameters, estimate.gradients, estimate.optimizer), strict=True):
        assert bytes_ == pytest.approx(measured, rel=0.03)


def test_the_estimate_follows_the_options():
    """In billions of parameters of Qwen3-8B: 8.19, of which 1.24 are embedding and head; 36 layers."""
    spec = spec_from_config(SHAPES["Qwen3-8B"])
    sizes = {}
    for name, fsdp in {
        "plain": FSDPConfig(), "replicas": FSDPConfig(replicas=2), "gathered": FSDPConfig(keep_gathered=True),
        "kept": FSDPConfig(reshard_after_forward=False), "host": FSDPConfig(cpu_adam=True),
    }.items():  # fmt: skip
        model = Sharded(spec, ParallelLayout.parse("fsdp:d8"), recompute="full", tokens_per_micro_batch=8192, fsdp=fsdp)
        (sizes[name],) = model.held(2)
    plain, billion = sizes["plain"], 1e9
    assert plain.parameters == pytest.approx(4 * 8.19 / 8 * billion, rel=0.01)
    assert (plain.gradients, plain.optimizer) == pytest.approx((plain.parameters, 2 * plain.parameters), rel=0.01)
    assert sizes["replicas"].parameters == pytest.approx(2 * plain.parameters, rel=0.01)
    assert sizes["gathered"].gradients - plain.gradients == pytest.approx(4 * 8.19 * billion, rel=0.01)
    # All layers but the two that are gathered anyway, in bfloat16.
    assert sizes["kept"].activations - plain.activations == pytest.approx(2 * (8.19 - 1.24) * 34 / 36 * billion, rel=0.01)
    assert (sizes["host"].parameters, sizes["host"].gradients, sizes["host"].optimizer) == (0, 0, 0)
    assert sizes["host"].activations == plain.activations
