"""One sequence of thousands of tokens: context-parallel ranks compute the update that one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.cluster import Together
from tests.support.gpu_models import build, random_batch
from tests.support.two_steps import OBJECTIVE

TOKENS = 3072
LAYOUTS = ["d1", "c2", "t2c2"]


def update(mesh, directory: Path):
    """Loss, gradient norm, log-probs before it and parameters after it, in float32 with full recomputation."""
    model = build(mesh, directory, "float32", TOKENS, recompute="full")
    batch = random_batch(1, TOKENS, model.spec.vocab, spread=0.0)
    logprobs_T = model.forward(batch)
    report = model.train_step(batch, OBJECTIVE.loss)
    return report.loss, report.grad_norm, logprobs_T, {name: tensor.clone() for name, tensor in model.weights()}


@pytest.fixture(scope="module")
def updates(cluster, models):
    return Together(cluster, {layout: (f"megatron:{layout}", update, models("qwen3")) for layout in LAYOUTS})


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_long_sequence_has_the_loss_and_gradients_of_one_rank_where_ranks_share_it(updates, layout):
    loss, norm, logprobs_T, weights = updates["d1"][0]
    assert norm > 0 and logprobs_T.count_nonzero() == TOKENS * 3 // 4
    for outputs in updates[layout]:
        assert outputs[0] == pytest.approx(loss, rel=1e-6, abs=1e-8) and outputs[1] == pytest.approx(norm, rel=2e-6)
        torch.testing.assert_close(outputs[2], logprobs_T, rtol=0, atol=2e-5)
        # Adam's first update moves every parameter by lr, in a direction that rounding decides only where a gradient is 0.
        for name, tensor in weights.items():
            torch.testing.assert_close(
                outputs[3][name], tensor, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
