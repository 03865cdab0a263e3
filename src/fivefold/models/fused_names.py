"""Names of norms in Transformer Engine's layers, which keep them in the linear layer after the norm. No torch here."""

from __future__ import annotations

from fivefold.models.spec import ModelSpec

FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Our name of a norm within a layer -> Transformer Engine's."""
SEPARATE = {theirs: ours for ours, theirs in FUSED.items()}


def fused_name(name: str, spec: ModelSpec, layer: int) -> str:
    """Return Transformer Engine's name of a parameter within a layer; only norms before a linear layer have one."""
    if name.startswith("pre_mlp_layernorm."):
        is_fused = not spec.has_experts(layer)
    else:
        is_fused = name in FUSED and name.startswith("input_layernorm.") == (spec.mla is None)
    return FUSED[name] if is_fused else name
