from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.layout import ParallelLayout
from fivefold.models.bridges import FAMILIES, bridge_fault
from fivefold.models.families import FAMILIES as OURS
from fivefold.models.families import spec_from_config
from tests.support.tiny_models import SIZES


@pytest.mark.parametrize(
    ("kind", "family", "layout", "virtual", "says"),
    [
        ("native", "seed_oss", "d1p2", 2, None),
        ("mbridge", "qwen3_moe", "d1t2e2", 1, None),
        ("megatron-bridge", "deepseek_v3", "d2e2", 1, None),
        ("megatron-bridge", "mixtral", "d1", 1, "must be native for mixtral: megatron-bridge converts llama, mistral, "),
        ("mbridge", "deepseek_v3", "d1", 1, "must be native for deepseek_v3: mbridge converts llama, qwen2, "),
        ("mbridge", "qwen3", "p2", 2, "must be native for virtual stages: got mbridge with 2"),
        ("mbridge", "qwen3_moe", "(attn:d2|ffn:t2)", 1, "mbridge converts 1 or 1, got 2"),
    ],
)
def test_what_a_bridge_cannot_convert_is_named_with_what_it_can(kind, family, layout, virtual, says):
    spec = replace(spec_from_config({"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 8, **SIZES}), family=family)
    fault = bridge_fault(kind, spec, ParallelLayout.parse(f"megatron:{layout}"), virtual)
    assert (fault is None) if says is None else (says in fault)


def test_every_family_of_a_bridge_is_one_of_ours():
    assert all(set(families) <= set(OURS) for families in FAMILIES.values())
