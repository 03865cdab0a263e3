from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.config import load_config
from fivefold.data.tokenizer import train_tokenizer
from fivefold.plan.check import check

ROOT = Path(__file__).resolve().parents[2]


RUNS = sorted(path for path in ROOT.glob("examples/**/*.yaml") if path.parent.name != "kubernetes")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_example_is_a_valid_configuration(path):
    load_config(path)


def test_the_readme_s_configuration_is_valid(tmp_path):
    block = (ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(block)
    config = load_config(tmp_path / "run.yaml")
    assert (config.layout.dp, config.layout.tp, config.samples_per_step) == (2, 4, 1024)


def test_the_siirl_page_s_arithmetic_comes_out():
    config = load_config(ROOT / "examples/qwen3-8b-grpo-megatron.yaml")
    assert config.layout.world_size == 8
    assert config.samples_per_step == 1024
    assert config.samples_per_step // config.algorithm.updates_per_step == 128


A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "torch_dtype": "bfloat16", "attention_bias": False, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
"""Qwen/Qwen3-30B-A3B."""
NOT_HERE = ("no model.safetensors", "needs ray, not installed", "is not installed; `pip install")
"""What a machine for tests lacks: the weights, Ray and the engines."""


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-areal-32gpus", "qwen3-30b-a3b-roll-two-layouts"])
def test_check_accepts_the_large_examples_by_the_sizes_of_their_model(tmp_path, name):
    model = tmp_path / "model"
    train_tokenizer("char", ["1+=user asnt"], model)
    (model / "config.json").write_text(json.dumps(A3B))
    rows = [{"prompt": "1+1=", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "11"}}] * 300
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"data.{kind}=[{tmp_path}/rows.jsonl]" for kind in ("train", "val")]
    given = [f"model.path={model}", "launch.gpu=h100-80g", "trainer.device=cuda", *files]
    found = check(load_config(ROOT / f"examples/{name}.yaml", given))
    assert [error for error in found.errors if not any(each in error for each in NOT_HERE)] == []
