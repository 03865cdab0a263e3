"""The parts of `config.json` that families share: dictionary -> fields of a ModelSpec. No torch here.

What one family has alone, and what it has by default, stands in its own file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.models.spec import ModelSpec, MoESpec, YarnSpec

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
"""Keys that every family must have."""

LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core's llama3 RoPE has these numbers built in; a model with others would be computed wrongly."""


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a model directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {directory}: model.path must be a Hugging Face model directory")
    loaded = json.loads(path.read_text())
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return loaded


def read_decoder(
    config: dict[str, Any],
    *,
    required: Sequence[str] = ("num_key_value_heads",),
    refused: Sequence[str] = ("attention_bias", "mlp_bias"),
    rope_types: Sequence[str] = ("default", "linear", "llama3"),
    rotary_fraction: float | None = None,
    head_dim: int | None = None,
) -> ModelSpec:
    """A decoder without experts, biases, windows or norms of queries and keys; a family replaces what it has besides.

    Args:
        required: keys that must be there besides the sizes.
        refused: keys that must be absent or false.
        rope_types: RoPE variants of the family.
        rotary_fraction: usual share of a head that RoPE turns; None where it is always the whole head.
        head_dim: size of a head where `head_dim` is absent; None for hidden size / heads.
    """
    family = config["model_type"]
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu' for {family}: got {config['hidden_act']!r}")
    for key in refused:
        if config.get(key):
            raise ValueError(f"{key}: true is not supported for {family} (the models of the family do not use it)")
    if absent := [key for key in (*SIZES, *required) if config.get(key) is None]:
        raise ValueError(f"config.json of a {family} model must have {', '.join(absent)}")
    rope = read_rope(config, rope_types, rotary_fraction)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return ModelSpec(
        family=str(family),
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        ffn=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or head_dim or hidden // heads),
        vocab=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope.theta,
        rope_linear_factor=rope.linear_factor,
        rope_llama3_factor=rope.llama3_factor,
        sliding_window=None,
        qkv_bias=False,
        qk_norm=False,
        tied=bool(config.get("tie_word_embeddings", False)),
        rotary_fraction=rope.fraction,
        yarn=rope.yarn,
    )


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a model."""

    theta: float
    fraction: float = 1.0
    linear_factor: float | None = None
    llama3_factor: float | None = None
    yarn: YarnSpec | None = None


def read_rope(config: dict[str, Any], types: Sequence[str], usual_fraction: float | None) -> Rope:
    """RoPE in the spelling of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`)."""
    family = config["model_type"]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    fraction = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or usual_fraction or 1.0)
    if fraction != 1.0 and usual_fraction is None:
        raise ValueError(f"partial_rotary_factor must be 1 for {family}: got {fraction}")
    if kind not in types:
        raise ValueError(f"RoPE variant {kind!r} is not supported for {family}; supported: {', '.join(types)}")
    if kind == "linear":
        return Rope(theta, fraction, linear_factor=float(rope["factor"]))
    if kind == "llama3":
        for key, fixed in LLAMA3_FIXED.items():
            if float(rope.get(key, fixed)) != fixed:
                raise ValueError(f"llama3 RoPE scaling is supported with {key}={fixed:g} only: got {rope[key]}")
        return Rope(theta, fraction, llama3_factor=float(rope["factor"]))
    if kind == "yarn":
        return Rope(theta, fraction, yarn=_read_yarn(rope, config))
    return Rope(theta, fraction)


def _read_yarn(rope: dict[str, Any], config: dict[str, Any]) -> YarnSpec:
    if rope.get("attention_factor") is not None or not rope.get("truncate", True):
        raise ValueError("yarn RoPE scaling is supported without attention_factor and with truncate: true only")
    if rope.get("factor") is None or not rope.get("mscale") or not rope.get("mscale_all_dim"):
        raise ValueError(f"yarn RoPE scaling of a {config['model_type']} model must have factor, mscale and mscale_all_dim")
    return YarnSpec(
        factor=float(rope["factor"]),
        original_positions=int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(rope["mscale"]),
        mscale_all_dim=float(rope["mscale_all_dim"]),
    )


def read_optional_window(config: dict[str, Any]) -> int | None:
    """The sliding window behind `use_sliding_window`, off unless it is true; it must be in all layers or in none."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if window is None:
        return None
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= int(config.get("max_window_layers", 28)) else "full_attention"
        for layer in range(int(config["num_hidden_layers"]))
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ValueError(
            f"a mixture of attention kinds over the layers is not supported: {kinds.count('sliding_attention')} of "
            f"{len(kinds)} layers have a sliding window; set use_sliding_window to false in config.json to train without"
        )
    return int(window)


def refuse_optional_window(config: dict[str, Any]) -> None:
    """Raise ValueError where `use_sliding_window` turns a window on."""
    if config.get("use_sliding_window", False) and config.get("sliding_window", 4096) is not None:
        raise ValueError(
            f"use_sliding_window: true is not supported for {config['model_type']}; the published models have it off"
        )


def read_expert_counts(config: dict[str, Any]) -> tuple[int, int]:
    """(experts of a layer, experts of a token)."""
    count = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if count is None:
        raise ValueError(f"config.json of a {config['model_type']} model must have the number of experts")
    top_k = int(config["num_experts_per_tok"])
    if not 1 <= top_k <= int(count):
        raise ValueError(f"num_experts_per_tok must lie between 1 and the {count} experts: got {top_k}")
    return int(count), top_k


def read_softmax_experts(config: dict[str, Any], shared_ffn: int = 0) -> MoESpec:
    """Experts as Qwen has them: scores are a softmax, `decoder_sparse_step` and `mlp_only_layers` choose the layers."""
    count, top_k = read_expert_counts(config)
    dense, every = config.get("mlp_only_layers") or [], int(config.get("decoder_sparse_step", 1))
    return MoESpec(
        count,
        top_k,
        int(config["moe_intermediate_size"]),
        tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(int(config["num_hidden_layers"]))),
        shared_ffn,
        shared_gate=bool(shared_ffn),
        normalize=bool(config.get("norm_topk_prob", False)),
    )


def read_sigmoid_experts(
    config: dict[str, Any], *, n_group: int, topk_group: int, dense_layers: int, routed_scaling_factor: float
) -> MoESpec:
    """Experts as DeepSeek-V3 has them: sigmoid scores, groups, a correction bias, shared experts, dense first layers.

    The arguments are what the family's models have where config.json has no value.
    """
    family = config["model_type"]
    count, top_k = read_expert_counts(config)
    groups, groups_chosen = int(config.get("n_group") or n_group), int(config.get("topk_group") or topk_group)
    if count % groups or groups_chosen > groups or (groups > 1 and top_k % groups_chosen):
        raise ValueError(
            f"experts must divide into n_group groups of which topk_group are chosen, and num_experts_per_tok must be a "
            f"multiple of topk_group: got {count} experts, n_group {groups}, topk_group {groups_chosen}, {top_k} of a token"
        )
    if groups > 1 and top_k // groups_chosen != 2:
        raise ValueError(
            f"groups of experts are scored by their two best (DeepSeek-V3), which Megatron-Core does only where "
            f"num_experts_per_tok / topk_group is 2: got {top_k} / {groups_chosen}"
        )
    if top_k < 2:
        raise ValueError(
            f"num_experts_per_tok must be at least 2 for {family}: Megatron-Core does not normalise a single score"
        )
    if not config.get("norm_topk_prob", True):
        raise ValueError(
            f"norm_topk_prob: false is not supported for {family}: Megatron-Core always normalises sigmoid scores"
        )
    first, ffn = config.get("first_k_dense_replace"), int(config["moe_intermediate_size"])
    dense = dense_layers if first is None else int(first)
    return MoESpec(
        count,
        top_k,
        ffn,
        tuple(layer >= dense for layer in range(int(config["num_hidden_layers"]))),
        shared_ffn=int(config.get("n_shared_experts", 1) or 0) * ffn,
        sigmoid=True,
        n_group=groups,
        topk_group=groups_chosen,
        routed_scaling_factor=float(config.get("routed_scaling_factor", routed_scaling_factor)),
    )
