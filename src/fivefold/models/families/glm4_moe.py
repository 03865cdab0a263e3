"""GLM-4.5 and GLM-4.6: experts as in DeepSeek-V3, RoPE on half of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder, read_flag, read_sigmoid_experts
from fivefold.models.family import Family
from fivefold.models.parameters import ROUTER_BIAS, Table, decoder, experts, shared_experts
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    spec = read_decoder(
        config,
        required=("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size"),
        refused=("mlp_bias",),
        rotary_fraction=0.5,
        norm_eps=1e-5,
    )
    return replace(
        spec,
        qkv_bias=read_flag(config, "attention_bias"),
        qk_norm=read_flag(config, "use_qk_norm"),
        moe=read_sigmoid_experts(config, n_group=1, topk_group=1, dense_layers=1, routed_scaling_factor=1.0),
    )


def _table(spec: ModelSpec) -> Table:
    return decoder(spec, *experts(), ROUTER_BIAS, *shared_experts(spec))


FAMILY = Family("glm4_moe", _read, _table)
