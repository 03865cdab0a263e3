"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and shared experts with a gate of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder, read_flag, read_softmax_experts, read_whole, refuse_optional_window
from fivefold.models.family import Family
from fivefold.models.parameters import Place, Sharding, Table, decoder, experts, layer_row, shared_experts
from fivefold.models.spec import ModelSpec

SHARED_GATE = layer_row("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", Sharding.REPLICATE, Place.SPARSE)


def _read(config: dict[str, Any]) -> ModelSpec:
    spec = read_decoder(config, required=("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size"))
    refuse_optional_window(config)
    shared_ffn = read_whole(config, "shared_expert_intermediate_size", 5632, low=0)
    return replace(spec, qkv_bias=read_flag(config, "qkv_bias", True), moe=read_softmax_experts(config, shared_ffn))


def _table(spec: ModelSpec) -> Table:
    shared = shared_experts(spec, "mlp.shared_expert")
    return decoder(spec, *experts(), *shared, *((SHARED_GATE,) if shared else ()))


FAMILY = Family("qwen2_moe", _read, _table)
