"""The bounds of the log-prob gate as they are by default: rounding passes, injected faults do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.build import MAX_LOGPROB_KL
from tests.support.cluster import Together

SHAPE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.15}
"""Of this range, entropy and rounding are about those of published weights."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def write(directory: Path, family: str, **changes) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def gated(mesh, directory: Path, dtype: str, fault: str):
    """The KL divergence that the gate sees for an engine with a fault."""
    from dataclasses import replace

    from benchmarks import gate_statistics as module
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, replace(module.POLICY, dtype=dtype, tokens_per_micro_batch=4096), mesh)
    make, change_weights, where, change = module.FAULTS[fault]
    engine = make(mesh, where(directory), dtype)
    change(engine)
    engine.update_weights(change_weights(model.weights(), model.spec.layers), 0)
    requests = module.requests_of(module.prompts_of(directory, model.spec.vocab, large=False), 4, 32)
    return module.measured(model, requests, list(engine.generate(requests)))["bounded_kl"]


CASES = [
    ("Qwen3", "bfloat16", "healthy", False),
    ("Qwen3", "bfloat16", "a layer's weights stale", True),
    ("Qwen3", "bfloat16", "rope base / 100", True),
    ("Qwen3", "float32", "healthy", False),
    ("Qwen3", "float32", "rope base / 100", True),
    ("Qwen3Moe", "float32", "healthy", False),
    ("Qwen3Moe", "float32", "routers' scores rounded", True),
]


@pytest.fixture(scope="module")
def divergences(cluster, tmp_path_factory):
    root = tmp_path_factory.mktemp("gate")
    models = {"Qwen3": write(root / "dense", "Qwen3"), "Qwen3Moe": write(root / "experts", "Qwen3Moe", **EXPERTS)}
    return Together(cluster, {case: ("megatron:d1", gated, models[case[0]], *case[1:3]) for case in CASES})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_default_bound_passes_rounding_and_catches_each_injected_fault(divergences, case):
    """With a factor of two on either side."""
    (divergence,), bound = divergences[case], MAX_LOGPROB_KL[case[1]]
    assert divergence > 2 * bound if case[3] else divergence < bound / 2
