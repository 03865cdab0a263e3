"""Shapes of the tensors in a model's files, by the row in the family's table: spec -> shapes. No torch here."""

from __future__ import annotations

from fivefold.models.headers import Shape
from fivefold.models.parameters import MappedParameter
from fivefold.models.spec import ModelSpec


def file_shapes(spec: ModelSpec, parameter: MappedParameter) -> tuple[Shape | None, ...]:
    """Return the shapes of `parameter.hf`, one per name; None for rows that only one family has."""
    hidden = spec.hidden
    name = parameter.row.removeprefix("decoder.layers.{layer}.")
    if parameter.row.startswith("output_layer") and spec.value_head:
        return ((1, hidden),)
    shapes: dict[str, tuple[Shape | None, ...]] = {
        "embedding.word_embeddings.weight": ((spec.vocab, hidden),),
        "output_layer.weight": ((spec.vocab, hidden),),
        "decoder.final_layernorm.weight": ((hidden,),),
        "input_layernorm.weight": ((hidden,),),
        "pre_mlp_layernorm.weight": ((hidden,),),
        **{f"mtp.layers.{{depth}}.{norm}.weight": ((hidden,),) for norm in ("enorm", "hnorm", "final_layernorm")},
        "mtp.layers.{depth}.eh_proj.weight": ((hidden, 2 * hidden),),
        **_gated("mlp", spec.ffn, hidden),
        **(_experts(spec) if spec.moe is not None else {}),
        **(_attention(spec) if spec.mla is None else _latent_attention(spec)),
    }
    return shapes.get(name, (None,) * len(parameter.hf))


def _attention(spec: ModelSpec) -> dict[str, tuple[Shape, ...]]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "self_attention.linear_qkv.weight": ((queries, spec.hidden), (keys, spec.hidden), (keys, spec.hidden)),
        "self_attention.linear_qkv.bias": ((queries,), (keys,), (keys,)),
        "self_attention.q_layernorm.weight": ((spec.head_dim,),),
        "self_attention.k_layernorm.weight": ((spec.head_dim,),),
        "self_attention.linear_proj.weight": ((spec.hidden, queries),),
    }


def _latent_attention(spec: ModelSpec) -> dict[str, tuple[Shape, ...]]:
    part = spec.mla
    assert part is not None
    queries, q_rank = spec.heads * (part.qk_nope + part.qk_rope), part.q_rank or 0
    return {
        "self_attention.linear_q_proj.weight": ((queries, spec.hidden),),
        "self_attention.linear_q_down_proj.weight": ((q_rank, spec.hidden),),
        "self_attention.q_layernorm.weight": ((q_rank,),),
        "self_attention.linear_q_up_proj.weight": ((queries, q_rank),),
        "self_attention.linear_kv_down_proj.weight": ((part.kv_rank + part.qk_rope, spec.hidden),),
        "self_attention.kv_layernorm.weight": ((part.kv_rank,),),
        "self_attention.linear_kv_up_proj.weight": ((spec.heads * (part.qk_nope + part.v_dim), part.kv_rank),),
        "self_attention.linear_proj.weight": ((spec.hidden, spec.heads * part.v_dim),),
    }


def _experts(spec: ModelSpec) -> dict[str, tuple[Shape, ...]]:
    part = spec.moe
    assert part is not None
    return {
        "mlp.router.weight": ((part.num_experts, spec.hidden),),
        "mlp.router.expert_bias": ((part.num_experts,),),
        "mlp.experts.{expert}.fc1": ((part.ffn, spec.hidden), (part.ffn, spec.hidden)),
        "mlp.experts.{expert}.fc2": ((spec.hidden, part.ffn),),
        "mlp.shared_experts.gate_weight": ((1, spec.hidden),),
        **_gated("mlp.shared_experts", part.shared_ffn, spec.hidden),
    }


def _gated(name: str, ffn: int, hidden: int) -> dict[str, tuple[Shape, ...]]:
    return {f"{name}.linear_fc1.weight": ((ffn, hidden), (ffn, hidden)), f"{name}.linear_fc2.weight": ((hidden, ffn),)}
