"""One GRPO step of transformers' models with linear attention, the same on every `fsdp:` layout."""

from __future__ import annotations

import pytest

from tests.support.fsdp import cases
from tests.support.two_steps import assert_equal, expected

DENSE = ("d2", "c2", "d2c2", "t2", "d2t2", "d4 replicas")
EXPERTS = (*DENSE, "d2e2", "d2t2e2", "d2t2e4")
FAMILIES = {
    "qwen3_next": ("qwen3_next", EXPERTS),
    "qwen3_5": ("qwen3_5_text", DENSE),
    "qwen3_5_moe": ("qwen3_5_moe_text", EXPERTS),
}
"""Variant of a tiny model -> its family and the layouts that it is compared on."""
CASES = [case for name, (_, layouts) in FAMILIES.items() for case in cases([name], layouts, [("qwen3_5", "d2")])]


@pytest.mark.parametrize(("name", "layout", "budget"), CASES, ids=str)
def test_a_step_is_the_same_on_every_layout(steps, models, name, layout, budget):
    """The state of a sequence never continues into the next, and a context-parallel rank has that of the whole sequence."""
    assert_equal(steps[name, layout, budget], expected(models(name)))
