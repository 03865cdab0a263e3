"""One GRPO step of transformers' models with experts, the same on every `fsdp:` layout, also where ranks divide the experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.learners import FSDPConfig
from tests.support.fsdp import cases, policy_of
from tests.support.two_steps import assert_equal, expected, run_step

LAYOUTS = ("d2", "c2", "d2c2", "d4 replicas", "t2", "d2t2", "d2e2", "d2c2e2", "d2t2e2", "d2t2e4", "d4e2 replicas")
FAMILIES = {
    "qwen3_moe": ("qwen3_moe", LAYOUTS),
    "glm4_moe": ("glm4_moe", LAYOUTS),
    "deepseek_v3": ("deepseek_v3", LAYOUTS),
    "gpt_oss": ("gpt_oss", LAYOUTS),
    "minimax_m2": ("minimax_m2", LAYOUTS),
}
"""Variant of a tiny model -> its family and the layouts that it is compared on."""
CASES = [case for name, (_, layouts) in FAMILIES.items() for case in cases([name], layouts, [("qwen3_moe", "d2t2e4")])]


@pytest.mark.parametrize(("name", "layout", "budget"), CASES, ids=str)
def test_a_step_is_the_same_on_every_layout(steps, models, name, layout, budget):
    """Ranks that exchange tokens have different numbers of them, and micro-batches in which some experts get none."""
    assert_equal(steps[name, layout, budget], expected(models(name)))


@pytest.mark.fsdp
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("d2t2e4", {"recompute": "full"}),
        ("d4e2", {"fsdp": FSDPConfig(keep_gathered=True)}),
        ("d8e8", {}),
        ("d8e2", {"fsdp": FSDPConfig(keep_gathered=True, replicas=2)}),
    ],
)
def test_recomputation_gathered_gradients_and_idle_replicas_change_nothing(cluster, models, layout, options):
    policy = replace(policy_of(layout), **options)
    assert_equal(run_step(cluster, f"fsdp:{layout}", models("qwen3_moe"), policy), expected(models("qwen3_moe")))
