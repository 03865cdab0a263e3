"""Families without a file here, trained through Megatron-Bridge: transformers and torch are the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.learners import MegatronConfig
from tests.megatron.test_bridges import through
from tests.megatron.test_hugging_face import hf_numbers
from tests.support.cluster import Together
from tests.support.tiny_models import BRIDGED_VARIANTS
from tests.support.two_steps import POLICY, assert_equal, expected, megatron_step

pytestmark = pytest.mark.bridges

LAYOUTS = ("d1", "t2", "p2", "c2", "d2")
BRIDGED = replace(POLICY, megatron=MegatronConfig(bridge_type="megatron-bridge"))


@pytest.fixture(scope="module")
def runs(cluster, models):
    """Log-probs and export, and two steps, by (what, model, layout)."""
    calls = {}
    for name in BRIDGED_VARIANTS:
        for layout in LAYOUTS:
            backend = f"megatron:{layout}"
            calls["load", name, layout] = backend, through, "megatron-bridge", models(name)
            calls["steps", name, layout] = backend, megatron_step, models(name), BRIDGED, expected(models(name))[2]
    return Together(cluster, calls)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BRIDGED_VARIANTS)
def test_log_probs_and_export_equal_transformers(runs, models, name, layout):
    expected_T, _, state = hf_numbers(models(name))
    for logprobs_T, weights in runs["load", name, layout]:
        assert (logprobs_T - expected_T).abs().max() <= 2e-5
        assert set(weights) == set(state)
        for key, tensor in weights.items():
            assert tensor.dtype == state[key].dtype and tensor.equal(state[key]), key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BRIDGED_VARIANTS)
def test_two_steps_equal_transformers_and_torch(runs, models, name, layout):
    assert_equal(runs["steps", name, layout], expected(models(name)))
