from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from fivefold.config import RunConfig
from fivefold.layout import ParallelLayout
from fivefold.models.bridges import FAMILIES, bridge_fault
from fivefold.models.families import FAMILIES as OURS
from fivefold.models.families import load_spec, spec_from_config
from fivefold.plan.check import check
from fivefold.plan.memory import rank_parameters
from tests.support.tiny_models import SIZES, make_model


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


def errors_of(model: Path, backend: str, *words: str) -> list[str]:
    """The errors of `check` but those of a tokenizer and data, which the tests do not have."""
    lengths = ("data.max_prompt_tokens=64", "data.max_response_tokens=64", "data.train=[sums.parquet]")
    run = [f"model.path={model}", f"policy.backend=megatron:{backend}", "algorithm.name=grpo", *lengths, *words]
    return [text for text in check(RunConfig.from_overrides(run)).errors if "tokenizer" not in text and text[:5] != "data."]


@pytest.fixture
def has_megatron_bridge(monkeypatch):
    """Megatron-Bridge counts as installed: nothing of it runs."""
    monkeypatch.setattr("fivefold.plan.check.missing_packages", lambda names: [])


BRIDGE = "policy.megatron.bridge_type=megatron-bridge"


@pytest.mark.usefixtures("has_megatron_bridge")
@pytest.mark.parametrize("backend", ["d2", "d1t2", "d1p2", "c2"])
@pytest.mark.parametrize("name", ["nemotron", "gemma"])
def test_check_accepts_a_family_that_comes_through_megatron_bridge(models, name, backend):
    assert errors_of(models(name), backend, BRIDGE, "algorithm.kl.coef=0.1") == []


@pytest.mark.usefixtures("has_megatron_bridge")
@pytest.mark.parametrize(
    ("name", "backend", "words", "says"),
    [
        (
            "nemotron",
            "d2",
            [],
            "policy.megatron.bridge_type must be megatron-bridge for nemotron, which has no file here: got native for "
            "megatron:d2t1p1; or write fsdp:d2, which needs no bridge",
        ),
        (
            "gemma",
            "d1",
            ["policy.megatron.bridge_type=mbridge"],
            "must be megatron-bridge for gemma, which has no file here",
        ),
        (
            "gemma2",
            "d2",
            [BRIDGE],
            "unknown model family 'gemma2' (model_type in config.json): megatron: layouts have no table of it; it has soft "
            "caps and windows in every second layer, which our layers do not compute: got megatron:d2t1p1; write fsdp:d2",
        ),
        ("phi3", "d2", [BRIDGE], "megatron: layouts have no table of it: got megatron:d2t1p1; write fsdp:d2"),
        (
            "nemotron",
            "p2",
            [BRIDGE, "policy.megatron.pipeline.virtual_pipeline_model_parallel_size=2"],
            "bridge_type converts no virtual stages: got 2 for nemotron, leave them out of megatron.pipeline",
        ),
        (
            "nemotron",
            "d1",
            [BRIDGE, "policy.megatron.transformer_impl=transformer_engine"],
            "policy.megatron.transformer_impl must be torch for nemotron",
        ),
        (
            "nemotron",
            "d1",
            ["policy.lora.rank=4"],
            "policy.lora.rank must be 0 for nemotron: adapters need a family that has a file here",
        ),
        ("nemotron", "d1", ["policy.mtp.train=true"], "policy.mtp.train needs layers of multi-token prediction"),
        (
            "gemma",
            "d1",
            ["algorithm.name=ppo", BRIDGE],
            "a value head on gemma, which has no file here, needs an fsdp: layout: got megatron:d1t1p1; write fsdp:d1",
        ),
        ("nemotron", "t3", [BRIDGE], "attention heads must be divisible by tp"),
    ],
)
def test_what_a_bridged_family_cannot_have_is_refused_in_one_sentence(models, name, backend, words, says):
    errors = errors_of(models(name), backend, *words)
    assert any(says in text for text in errors), errors


@pytest.mark.parametrize("words", ["policy.lora.rank=4", "policy.mtp.train=true"])
def test_adapters_and_multi_token_prediction_through_a_bridge_are_refused(models, words):
    with pytest.raises(ValueError, match=r"policy.megatron.bridge_type must be native with .*: got megatron-bridge"):
        errors_of(models("nemotron"), "d1", words, BRIDGE)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("nemotron", {"attention_bias": True}, "attention_bias: true is not supported for nemotron"),
        ("nemotron", {"mlp_bias": True}, "mlp_bias: true is not supported for nemotron"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act must be 'relu2' for nemotron: got 'silu'"),
        ("nemotron", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "RoPE variant 'linear' is not supported"),
        ("gemma", {"attention_bias": True}, "attention_bias: true is not supported for gemma"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: true is not supported for gemma"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act must be 'gelu_pytorch_tanh' for gemma: got 'silu'"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh' or null for gemma"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings must be true for gemma"),
        ("gemma", {"quantization_config": {"bits": 4}}, "quantization_config in config.json must be left out"),
    ],
)
def test_layers_that_only_fsdp_computes_are_refused_on_megatron(tmp_path, name, changes, says):
    directory = make_model(name, tmp_path / "model")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    spec = load_spec(directory)
    with pytest.raises(ValueError, match="cannot compute this") as caught:
        spec.check_layout(ParallelLayout.parse("megatron:d2"))
    assert says in str(caught.value) and str(caught.value).endswith("write fsdp:d2")
    spec.check_layout(ParallelLayout.parse("fsdp:d2"))


@pytest.mark.parametrize("name", ["nemotron", "gemma"])
def test_plans_count_the_parameters_that_the_files_of_a_bridged_family_have(models, name):
    spec = load_spec(models(name))
    padding = (spec.padded_vocab - spec.vocab) * spec.hidden * (1 if spec.tied else 2)
    final_norm = sum(prod(shape) for tensor, shape in spec.stored.tensors if tensor.startswith("model.norm."))
    [stage] = rank_parameters(spec, ParallelLayout.parse("megatron:d2"))
    assert stage.total == spec.parameters + padding - final_norm
