"""Layers that are computed again leave out what only the next layer would read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.learners import MegatronConfig
from tests.support.cluster import Together
from tests.support.two_steps import POLICY, assert_equal, expected, megatron_step

LAYERS, UPDATES = 4, 2


def step_with_unread_nan(mesh, directory: Path, policy, base_T):
    """The step, and how many products were left out; what stands in their place is not a number."""
    from fivefold.megatron.layers import recompute

    seen = []
    for kind in (recompute._UnreadProduct, recompute._UnreadScatter):

        def forward(ctx: Any, *given: Any, kind: Any = kind, original: Any = kind.forward) -> torch.Tensor:
            seen.append(kind)
            return original(ctx, *given).fill_(torch.nan)

        kind.forward = staticmethod(forward)
    return megatron_step(mesh, directory, policy, base_T), seen.count(recompute._UnreadProduct)


def recomputing(method: str, layers: int):
    options = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    return replace(POLICY, megatron=MegatronConfig(transformer=options))


CASES = {
    # Of two layers that are computed again together, the second reads what the first gives.
    ("qwen3", "d1", "uniform", 1): LAYERS,
    ("qwen3", "d1", "uniform", 2): 0,
    ("qwen3", "t2", "uniform", 1): LAYERS,
    ("qwen3", "p2", "block", 1): 1,
    ("qwen2_tied", "t2", "block", 3): 3,
}
"""(model, layout, method, layers) -> products left out on a rank in each update."""


@pytest.fixture(scope="module")
def steps(cluster, models):
    """Results by case."""
    return Together(
        cluster,
        {
            case: (
                f"megatron:{case[1]}",
                step_with_unread_nan,
                models(case[0]),
                recomputing(*case[2:]),
                expected(models(case[0]))[2],
            )
            for case in CASES
        },
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_one_reads_what_a_layer_leaves_out_when_it_is_computed_again(steps, models, case):
    results = steps[case]
    assert_equal([result for result, _ in results], expected(models(case[0])))
    assert [count for _, count in results] == [UPDATES * CASES[case]] * len(results)
