"""MiMo-7B: Qwen2's layers, and a multi-token prediction layer with its own names."""

from __future__ import annotations

from fivefold.models.families.qwen2 import FAMILY as QWEN2
from fivefold.models.family import Family
from fivefold.models.parameters import MTPNames

MTP = MTPNames(
    layer="model.mtp_layers.{depth}.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    hidden_first=True,
)

FAMILY = Family("mimo", QWEN2.read, QWEN2.table, known_as=("qwen2", "Qwen2ForCausalLM"), mtp=MTP)
