"""What can go wrong in a step of an `fsdp:` layout: no rank waits without end, and the message says what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fsdp.test_model import model_on, one_update
from tests.support.fsdp import policy_of
from tests.support.two_steps import assert_equal


def skipping(mesh, directory: Path, everywhere: bool):
    """Two updates of a model whose first layer leaves out its MLP on the last rank, or on all, and the printed lines."""
    import contextlib
    import io

    model = model_on(mesh, directory, policy_of("d2"))
    mlp = model._model.layers[0].mlp
    if everywhere or mesh.ranks.rank == mesh.layout.world_size - 1:
        mlp.forward = lambda hidden: hidden * 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        reports = [one_update(model, mesh) for _ in range(2)]
    weights = {name: tensor.clone() for name, tensor in model.weights()}
    return reports, weights, printed.getvalue()


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_part_that_a_rank_leaves_out_counts_as_0_and_is_named_once(cluster, models, everywhere):
    results = cluster.run(skipping, "fsdp:d2", models("qwen3"), everywhere)
    lines = results[0][2].splitlines()
    ranks = "ranks 0, 1" if everywhere else "rank 1"
    assert len(lines) == 1 and f"model.layers.0.mlp.gate_proj.weight (not on {ranks})" in lines[0], lines
    assert "no gradient, so their share counts as 0" in lines[0] and not results[1][2]
    assert_equal([(reports, weights) for reports, weights, _ in results[1:]], oracle_of(results[0]))


def oracle_of(result):
    reports, weights, _ = result
    return [(report.loss, report.grad_norm) for report in reports], weights, None


def shares(mesh, directory: Path, skips: bool):
    """The gradients of an update by name, where rank 1 leaves out the first MLP."""
    from fivefold.fsdp import step

    model = model_on(mesh, directory, policy_of("d2"))
    if skips and mesh.ranks.rank == 1:
        model._model.layers[0].mlp.forward = lambda hidden: hidden * 0
    kept, original = {}, step.finish_gradients

    def keeping(tensors, mesh_of_step):
        gradients = original(tensors, mesh_of_step)
        kept.update({tensor.name: tensor.parameter.grad.full_tensor().clone() for tensor, _ in gradients})
        return gradients

    step.finish_gradients = keeping
    one_update(model, mesh)
    return kept


def test_the_gradient_of_a_part_that_one_rank_leaves_out_is_that_of_the_others(cluster, models):
    """It is not 0, not missing, and no other parameter's gradient gets in its place."""
    with_it, without = (cluster.run(shares, "fsdp:d2", models("qwen3"), skips)[0] for skips in (False, True))
    assert set(with_it) == set(without)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert float(without[name].norm()) > 0.01 and not torch.allclose(with_it[name], without[name])


def frozen(mesh, directory: Path):
    model = model_on(mesh, directory, policy_of("d2"))
    if mesh.ranks.rank == 1:
        model._tensors[4].parameter.requires_grad_(False)
    one_update(model, mesh)


def test_a_parameter_that_is_frozen_on_one_rank_ends_the_step_with_its_name(cluster, models):
    says = r"all ranks must train the same parameters: model.layers.0\S+ \(not on rank 1\)"
    with pytest.raises(RuntimeError, match=says):
        cluster.run(frozen, "fsdp:d2", models("qwen3"), seconds=120)


def full(mesh, directory: Path, part: str):
    """A step in which one part finds no memory."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups

    from fivefold.backend import log_probs
    from fivefold.fsdp import updater

    def fails(*given, **named):
        raise torch.OutOfMemoryError("out of memory")

    model = model_on(mesh, directory, policy_of("d2"))
    if part == "logits":
        log_probs._logits = fails
    elif part == "gathered layer":
        groups.foreach_all_gather = fails
    elif part == "moments":
        updater.Updater.step.__globals__["torch"].optim.AdamW.step = fails
    else:
        model._model.layers[1].mlp.forward = fails
    one_update(model, mesh)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("logits", "memory for the logits of one chunk of tokens: lower policy.tokens_per_micro_batch"),
        ("gathered layer", "memory for a gathered layer, or its gradient: set policy.fsdp.cpu_adam: true"),
        ("moments", "memory for Adam's moments: raise d, or set policy.fsdp.cpu_adam: true"),
        ("activations", "memory for activations: set policy.recompute: full"),
    ],
)
def test_memory_that_runs_out_names_the_part_and_what_to_change(cluster, models, part, says):
    with pytest.raises(RuntimeError, match=f"OutOfMemoryError: the device ran out of {says}"):
        cluster.run(full, "fsdp:d2", models("qwen3"), part)
