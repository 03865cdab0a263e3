"""One GRPO step of transformers' models, the same on every `fsdp:` layout: loss, gradient norm and every updated parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.fsdp_checks import PROVEN_TENSOR_PARALLEL
from fivefold.config.learners import FSDPConfig
from tests.support.fsdp import Lazily, policy_of
from tests.support.two_steps import assert_equal, expected, fsdp_step, run_step

FAMILIES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "mistral_window": "mistral", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3", "olmo2": "olmo2", "olmo3": "olmo3", "smollm3": "smollm3",
}  # fmt: skip
"""Variant of a tiny model -> its family."""
EXPERTS = ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
"""Variants with experts, which have no t and no e here."""
LAYOUTS = ["d2", "d4", "c2", "d2c2", "t2", "d2t2", "d4 replicas"]
FAST = [("qwen3", "d2"), ("qwen3", "d2t2"), ("qwen3", "d4 replicas"), ("gemma2", "d2"), ("gemma2", "c2"), ("phi3", "t2")]
CASES = [
    pytest.param(name, layout, budget, marks=() if (name, layout) in FAST and budget == 32 else pytest.mark.fsdp)
    for name in FAMILIES
    for layout in LAYOUTS
    for budget in ((1000, 32) if layout in ("d2", "c2", "t2") else (32,))
]
CASES += [
    pytest.param(name, layout, 32, marks=() if (name, layout) == ("qwen3_moe", "d2") else pytest.mark.fsdp)
    for name in EXPERTS
    for layout in ("d2", "c2", "d2c2", "d4 replicas")
]


@pytest.fixture(scope="module")
def steps(cluster, models):
    """Results by (model, layout, budget)."""

    def call(name: str, layout: str, budget: int):
        directory = models(name)
        return f"fsdp:{layout.split()[0]}", fsdp_step, directory, policy_of(layout, budget), expected(directory)[2]

    return Lazily(cluster, call)


@pytest.fixture(scope="module", autouse=True)
def _selected(request, steps):
    steps.wanted += [
        tuple(item.callspec.params[key] for key in ("name", "layout", "budget"))
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_a_step_is_the_same_on_every_layout" and item.module is request.module
    ]


@pytest.mark.parametrize(("name", "layout", "budget"), CASES, ids=str)
def test_a_step_is_the_same_on_every_layout(steps, models, name, layout, budget):
    """Clipped gains and KL, over packed sequences; the oracle computes one sequence at a time in one process."""
    assert_equal(steps[name, layout, budget], expected(models(name)))


def test_the_families_with_tensor_parallelism_are_those_that_are_compared_here():
    assert set(FAMILIES.values()) == PROVEN_TENSOR_PARALLEL


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("d2c2", {"recompute": "full"}),
        ("d2", {"fsdp": FSDPConfig(keep_gathered=True)}),
        pytest.param("d4", {"fsdp": FSDPConfig(keep_gathered=True, replicas=2)}, marks=pytest.mark.fsdp),
        pytest.param("d8", {}, marks=pytest.mark.fsdp),
    ],
)
def test_recomputation_gathered_gradients_and_idle_replicas_change_nothing(cluster, models, layout, options):
    policy = replace(policy_of(layout), **options)
    assert_equal(run_step(cluster, f"fsdp:{layout}", models("qwen3"), policy), expected(models("qwen3")))
