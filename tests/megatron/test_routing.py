"""Routers at their limits: everything to one expert, and what a step records of the load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.learners import MegatronConfig
from tests.support.cluster import Together
from tests.support.layout_cases import VPP2, Case
from tests.support.two_steps import BOUNDS, POLICY, ROUTER, assert_equal, expected, megatron_step, policy_of, run_step

CASES = [
    Case("d1"),
    Case("d2e2"),
    Case("t2e2"),
    Case("d4e4"),
    Case("c2e2"),
    Case("(attn:t2|ffn:t2)"),
    Case("d2p2e2"),
    Case("p2", VPP2),
]
DISPATCHERS = ["alltoall", "allgather"]
COLLAPSED = replace(POLICY, megatron=MegatronConfig(transformer=ROUTER))


@pytest.fixture(scope="module")
def collapsed(cluster, models):
    """Results by (layout, dispatcher)."""
    directory = models("deepseek_v3_collapsed")

    def call(case: Case, dispatcher: str):
        policy = policy_of("deepseek_v3", case, 32)
        options = {**ROUTER, "moe_token_dispatcher_type": dispatcher}
        policy = replace(policy, megatron=replace(policy.megatron, transformer=options))
        return f"megatron:{case.layout}", megatron_step, directory, policy, expected(directory, COLLAPSED)[2]

    return Together(
        cluster, {(case.layout, dispatcher): call(case, dispatcher) for case in CASES for dispatcher in DISPATCHERS}
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_router_with_all_tokens_to_the_same_experts_neither_hangs_nor_differs(collapsed, models, case, dispatcher):
    """All tokens choose experts 0 and 1 of 8; ranks that hold none of them still take part, their gradients are zero."""
    results = collapsed[case.layout, dispatcher]
    assert_equal(results, expected(models("deepseek_v3_collapsed"), COLLAPSED))
    for reports, _ in results:
        metrics = reports[0].metrics
        # Two of eight experts share all tokens: each has four times the mean.
        assert {name: value for name, value in metrics.items() if name.startswith("moe/load_max")} == {
            "moe/load_max": 4.0,
            "moe/load_max/layer_01": 4.0,
            "moe/load_max/layer_02": 4.0,
            "moe/load_max/layer_03": 4.0,
        }


def expert_metrics(mesh, directory: Path, policy, base_T):
    reports, _ = megatron_step(mesh, directory, policy, base_T)
    return {name: value for name, value in reports[0].metrics.items() if name.startswith("moe/")}


def test_loads_and_router_losses_are_the_same_on_every_layout(cluster, models):
    directory = models("qwen3_moe")
    metrics_of_runs = [
        metrics
        for layout in ("d1", "d2e2", "t2e2", "p2", "c2e2")
        for metrics in run_step(cluster, layout, directory, policy_of("qwen3_moe", Case(layout), 32), expert_metrics)
    ]
    assert len(metrics_of_runs[0]) == 6
    assert metrics_of_runs[0]["moe/aux_loss"] > 0.3, "0.3 x 4 layers x at least 1"
    for metrics in metrics_of_runs[1:]:
        assert metrics == pytest.approx(metrics_of_runs[0], rel=1e-5)


@pytest.mark.parametrize("layout", ["d1", "t2e2", "c2e2", "p2"])
def test_the_loss_of_a_micro_batch_is_the_same_however_its_tokens_are_cut(cluster, models, layout):
    """aux_loss is defined over micro-batches; with one micro-batch of one replica no cut inside it may change it."""
    options = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}
    policy = replace(POLICY, megatron=MegatronConfig(transformer=options))
    oracle = expected(models("qwen3_moe"), replace(POLICY, megatron=MegatronConfig(transformer=ROUTER)))
    one = run_step(cluster, "d1", models("qwen3_moe"), policy, oracle=oracle)[0]
    for reports, weights in run_step(cluster, layout, models("qwen3_moe"), policy, oracle=oracle):
        for report, expected_report in zip(reports, one[0], strict=True):
            assert report.grad_norm == pytest.approx(expected_report.grad_norm, rel=BOUNDS[1])
        assert max(float((weights[name] - one[1][name]).abs().max()) for name in weights) <= BOUNDS[2]
