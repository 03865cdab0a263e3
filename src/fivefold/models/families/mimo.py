"""MiMo-7B: Qwen2's layers, and one of multi-token prediction under names of its own."""

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
