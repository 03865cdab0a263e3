"""Fused operations take the place of transformers' where the class computes the usual one, and of no other."""

from __future__ import annotations

import importlib

import pytest
import torch

from fivefold.fsdp import fused

NAMES = {"minimax_m2": "MiniMaxM2", "deepseek_v3": "DeepseekV3", "olmo2": "Olmo2", "smollm3": "SmolLM3", "gpt_oss": "GptOss"}


def class_of(family: str, suffix: str) -> type:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = NAMES.get(family, "".join(part.capitalize() for part in family.split("_")))
    return getattr(module, name + suffix)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "qwen3_moe", "deepseek_v3"]
)
def test_the_usual_norm_is_fused(family):
    assert fused.is_usual_norm(class_of(family, "RMSNorm"))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3_next"])
def test_a_norm_that_adds_one_to_its_weight_stays(family):
    assert not fused.is_usual_norm(class_of(family, "RMSNorm"))


def test_a_gate_is_fused_with_silu_alone():
    mlp = class_of("qwen3", "MLP")
    assert fused.is_usual_gate(mlp, torch.nn.SiLU)
    assert not fused.is_usual_gate(mlp, torch.nn.GELU)
    assert not fused.is_usual_gate(class_of("gpt_oss", "MLP"), torch.nn.SiLU)
    # An activation that cannot be made without arguments.
    assert not fused.is_usual_gate(mlp, torch.nn.Threshold)


def test_a_rotation_of_neighbours_stays():
    rotation = {
        family: importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
        for family in ("qwen3", "cohere", "glm")
    }
    assert {family: fused.is_usual_rotation(function) for family, function in rotation.items()} == {
        "qwen3": True, "cohere": False, "glm": False,
    }  # fmt: skip
