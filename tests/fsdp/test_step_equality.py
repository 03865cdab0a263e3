"""One GRPO step of transformers' dense models, the same on every `fsdp:` layout: loss, gradient norm, every updated parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.fsdp_checks import PROVEN
from fivefold.config.learners import FSDPConfig
from tests.fsdp import test_expert_steps, test_linear_attention_steps
from tests.support.fsdp import cases, policy_of
from tests.support.two_steps import assert_equal, expected, run_step

FAMILIES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "mistral_window": "mistral", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3", "olmo2": "olmo2", "olmo3": "olmo3", "smollm3": "smollm3",
}  # fmt: skip
"""Variant of a tiny model -> its family."""
LAYOUTS = ("d2", "d4", "c2", "d2c2", "t2", "d2t2", "d4 replicas")
SCALED = ("granite", "cohere")
"""Families whose logits have a scale of their own; t is not compared."""
PLAIN = [("qwen3", "d2"), ("qwen3", "d2t2"), ("qwen3", "d4 replicas"), ("gemma2", "d2"), ("gemma2", "c2"), ("phi3", "t2")]
CASES = [*cases(FAMILIES, LAYOUTS, PLAIN), *cases(SCALED, ("d2",), [(name, "d2") for name in SCALED])]


@pytest.mark.parametrize(("name", "layout", "budget"), CASES, ids=str)
def test_a_step_is_the_same_on_every_layout(steps, models, name, layout, budget):
    """Clipped gains and KL, over packed sequences; the oracle computes one sequence at a time in one process."""
    assert_equal(steps[name, layout, budget], expected(models(name)))


def test_the_table_of_families_has_the_dimensions_that_are_compared():
    compared: dict[str, str] = dict.fromkeys(FAMILIES.values(), "t")
    for module in (test_expert_steps, test_linear_attention_steps):
        for family, layouts in module.FAMILIES.values():
            compared[family] = "".join(letter for letter in "te" if any(letter in layout.split()[0] for layout in layouts))
    assert compared == PROVEN


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
