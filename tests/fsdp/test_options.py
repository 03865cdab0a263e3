"""Options of `fsdp:` layouts: where state is, what is compiled and when layers are gathered changes no number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.config.learners import FSDPConfig, OffloadConfig, PolicyConfig
from tests.support.fsdp import policy_of
from tests.support.two_steps import assert_equal, difference, expected, fsdp_step, run_step, updated

FLOAT16 = (5e-3, 2e-2, 3e-3)
"""Relative loss, relative gradient norm, absolute parameter: 11 bits where float32 has 24, as for Megatron-Core; parameters
are float32 here."""
FLOAT16_EXPERTS = (3e-2, 6e-2, 4.5e-3)
"""Bounds for a model with experts: where two have nearly equal scores, rounding may choose the other one for a token. transformers
itself routes 4 of 416 tokens otherwise in float16, and one token's log-prob moves by 0.107. Two updates of lr 1e-3 the other way
are 4e-3."""
SCALE = 2.0**8
"""Loss scale with which no gradient of the tiny models overflows: a layer's weights get theirs in 16 bits."""


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("qwen3", "d2", {"cpu_adam": True}),
        ("qwen3", "d2t2", {"cpu_adam": True, "keep_gathered": True}),
        ("qwen3", "d2c2", {"reshard_after_forward": False}),
        pytest.param("qwen3_moe", "d4", {"cpu_adam": True, "replicas": 2}, marks=pytest.mark.fsdp),
        pytest.param("qwen3_moe", "d2e2", {"cpu_adam": True}, marks=pytest.mark.fsdp),
        pytest.param("qwen3_moe", "d2t2e4", {"cpu_adam": True}, marks=pytest.mark.fsdp),
        pytest.param("qwen3_moe", "d2e2", {"reshard_after_forward": False}, marks=pytest.mark.fsdp),
        pytest.param("gemma2", "d2", {"cpu_adam": True, "reshard_after_forward": False}, marks=pytest.mark.fsdp),
        pytest.param("qwen3", "d2", {"compile": True}, marks=pytest.mark.slow),
        pytest.param("qwen3", "d1t2", {"compile": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "d2", {"compile": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "d2e2", {"compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_option_changes_no_number(cluster, models, name, layout, options):
    policy = replace(policy_of(layout), fsdp=FSDPConfig(**options))
    assert_equal(run_step(cluster, f"fsdp:{layout}", models(name), policy), expected(models(name)))


@pytest.mark.slow
def test_compiled_layers_are_recomputed_in_backward(cluster, models):
    policy = replace(policy_of("d2"), fsdp=FSDPConfig(compile=True), recompute="full")
    assert_equal(run_step(cluster, "fsdp:d2", models("qwen3"), policy), expected(models("qwen3")))


def with_fewer_gathers(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    """The two steps, with the number of layers that are gathered in the first."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from fivefold.fsdp.mesh import build_mesh
    from fivefold.fsdp.model import FSDPModel

    model = FSDPModel(directory, policy, build_mesh(mesh.ranks, mesh.device), total_updates=2)
    gathers, original = [], FSDPParamGroup.wait_for_unshard

    def counted(group):
        gathers.append(group._all_gather_result is not None)
        original(group)

    FSDPParamGroup.wait_for_unshard = counted
    reports, weights = updated(model, mesh, base_T)
    return sum(gathers), reports, weights


def test_layers_that_stay_gathered_are_gathered_once_for_both_passes(cluster, models):
    counts = {}
    for again in (True, False):
        policy = replace(policy_of("d2", 1000), fsdp=FSDPConfig(reshard_after_forward=again))
        counts[again], *_ = run_step(cluster, "fsdp:d2", models("qwen3"), policy, with_fewer_gathers)[0]
    # Two updates of one micro-batch: four layers twice or once, and the ends once. The weights are gathered at the end.
    assert counts == {True: 2 * (2 * 4 + 1) + 5, False: 2 * (4 + 1) + 5}


def places(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    """What offload moves after the steps, and the devices of the moments."""
    from fivefold.fsdp.mesh import build_mesh
    from fivefold.fsdp.model import FSDPModel

    model = FSDPModel(directory, policy, build_mesh(mesh.ranks, mesh.device), total_updates=2)
    updated(model, mesh, base_T)
    moved = model.offload()
    model.onload()
    return moved, {str(tensor.device) for tensor in model._updater.state_tensors()}


def options_of_units(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    """For each module that FSDP shards: its number of parameters, whether they are on the host, and whether it reshards."""
    from fivefold.fsdp.mesh import build_mesh
    from fivefold.fsdp.model import FSDPModel
    from fivefold.fsdp.packed_model import fsdp_modules

    model = FSDPModel(directory, policy, build_mesh(mesh.ranks, mesh.device), total_updates=2)
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_modules(model._model)]
    return [
        (len(group.fsdp_params), group.fsdp_params[0].offload_to_cpu, group.post_forward_mesh_info is not None)
        for group in groups
        if group
    ]


def test_options_reach_divided_experts_as_other_parameters(cluster, models):
    """Numbers cannot show where state is on a machine whose device is the host."""
    policy = replace(policy_of("d2e2"), fsdp=FSDPConfig(cpu_adam=True, reshard_after_forward=False))
    for units in run_step(cluster, "fsdp:d2e2", models("qwen3_moe"), policy, options_of_units):
        # Four layers, their experts and the ends; two stacked parameters of experts each.
        assert len(units) == 9 and [count for count, *_ in units].count(2) >= 4
        assert all(on_host and not reshards for _, on_host, reshards in units)


def test_state_in_host_memory_is_not_offloaded_again(cluster, models):
    policy = policy_of("d2", offload=OffloadConfig(parameters=True, optimizer=True))
    policy = replace(policy, fsdp=FSDPConfig(cpu_adam=True))
    for moved, devices in run_step(cluster, "fsdp:d2", models("qwen3"), policy, places):
        assert not moved and devices == {"cpu"}


def small_scale(mesh, *arguments):
    from fivefold.config.mcore_options import LOSS_SCALE

    LOSS_SCALE["initial_loss_scale"] = SCALE
    return fsdp_step(mesh, *arguments)


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "d2"), pytest.param("qwen3_moe", "d2", marks=pytest.mark.fsdp)])
def test_a_step_in_float16_with_a_loss_scale_is_that_of_float32_up_to_rounding(cluster, models, name, layout):
    results = run_step(cluster, f"fsdp:{layout}", models(name), policy_of(layout, dtype="float16"), small_scale)
    differences = difference(results, expected(models(name)))
    bounds = FLOAT16_EXPERTS if name == "qwen3_moe" else FLOAT16
    assert all(size <= bound for size, bound in zip(differences, bounds, strict=True)), differences
    assert differences[0] > 1e-6, "it has computed in float32"
    for reports, _ in results:
        assert [report.loss_scale for report in reports] == [SCALE] * 2


def overflowing(mesh, directory: Path, policy: PolicyConfig, base_T: torch.Tensor):
    """[(skipped, overflowed, scale)] of updates whose gradients of 16 bits overflow at first; whether a skip changed weights."""
    from fivefold.config.mcore_options import LOSS_SCALE
    from fivefold.fsdp.mesh import build_mesh
    from fivefold.fsdp.model import FSDPModel
    from tests.support.shards import shard_of_replica
    from tests.support.two_steps import LENGTHS, OBJECTIVE, whole_batch

    LOSS_SCALE["initial_loss_scale"] = 2.0**40
    model = FSDPModel(directory, policy, build_mesh(mesh.ranks, mesh.device), total_updates=64)
    before = {name: tensor.clone() for name, tensor in model.weights()}
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    updates = []
    for _ in range(64):
        report = model.train_step(mine, OBJECTIVE.loss)
        updates.append((report.skipped, report.overflowed, report.loss_scale))
        if not report.skipped:
            break
        assert all(bool((tensor == before[name]).all()) for name, tensor in model.weights())
    return updates, model.version


def test_an_overflow_in_float16_is_skipped_and_halves_the_scale_until_it_fits(cluster, models):
    policy = policy_of("d2", dtype="float16")
    for updates, version in run_step(cluster, "fsdp:d2", models("qwen3"), policy, overflowing):
        assert updates[0] == (True, True, 2.0**40) and not updates[-1][0] and len(updates) > 4
        assert all(skipped and overflowed for skipped, overflowed, _ in updates[:-1])
        assert updates[-1][2] < 2.0**34 and version == 1
