"""DeepSeek-V3: latent attention, and experts with sigmoid scores, a correction bias and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.errors import UserError
from fivefold.models.config_json import read_decoder, read_flag, read_sigmoid_experts, read_whole
from fivefold.models.family import Family
from fivefold.models.parameters import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    NORMS,
    ROUTER_BIAS,
    Sharding,
    Table,
    experts,
    gated_mlp,
    head,
    layer_row,
    shared_experts,
)
from fivefold.models.spec import MLASpec, ModelSpec

PLAIN_QUERIES = (layer_row("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", Sharding.COLUMN),)
LATENT_QUERIES = (
    layer_row("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", Sharding.REPLICATE),
    layer_row("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", Sharding.REPLICATE),
    layer_row("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", Sharding.COLUMN),
)
LATENT_KEYS_AND_VALUES = (
    layer_row("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", Sharding.REPLICATE),
    layer_row("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", Sharding.REPLICATE),
    layer_row("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", Sharding.COLUMN),
)


def _read(config: dict[str, Any]) -> ModelSpec:
    latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    spec = read_decoder(
        config,
        required=(*latent, "num_experts_per_tok", "moe_intermediate_size"),
        rope_types=("default", "yarn"),
    )
    moe = read_sigmoid_experts(config, n_group=8, topk_group=4, dense_layers=3, routed_scaling_factor=2.5)
    if not read_flag(config, "rope_interleave", True):
        raise UserError("rope_interleave: false is not supported: Megatron-Core's latent attention has it built in")
    mla = MLASpec(
        q_rank=read_whole(config, "q_lora_rank", None if "q_lora_rank" in config else 1536),
        kv_rank=read_whole(config, "kv_lora_rank"),
        qk_nope=read_whole(config, "qk_nope_head_dim"),
        qk_rope=read_whole(config, "qk_rope_head_dim"),
        v_dim=read_whole(config, "v_head_dim"),
    )
    if mla.qk_rope % 2:
        raise UserError(f"qk_rope_head_dim must be even, RoPE turns pairs: got {mla.qk_rope}")
    return replace(spec, kv_heads=spec.heads, moe=moe, mla=mla)


def _table(spec: ModelSpec) -> Table:
    assert spec.mla is not None
    queries = PLAIN_QUERIES if spec.mla.q_rank is None else LATENT_QUERIES
    return (
        EMBEDDING,
        *NORMS,
        *queries,
        *LATENT_KEYS_AND_VALUES,
        ATTENTION_OUTPUT,
        *gated_mlp(),
        *experts(),
        ROUTER_BIAS,
        *shared_experts(spec),
        *head(spec),
    )


FAMILY = Family("deepseek_v3", _read, _table)
