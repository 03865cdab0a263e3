"""Parsing of `config.json` that families share: dictionary -> fields of a ModelSpec. No torch here.

Each family's own keys and defaults are in its own file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.files import read_json_object
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
"""Numbers that Megatron-Core's llama3 RoPE has built in; a model with other numbers would be computed incorrectly."""


MOST_LAYERS, MOST_EXPERTS = 4096, 2**20
_HUGE = 2**31 - 1
_REQUIRED: Any = object()


def read_whole(config: dict[str, Any], key: str, default: Any = _REQUIRED, *, low: int = 1, high: int = _HUGE) -> Any:
    """Read a whole number; `default`, which may be None, if it is absent or null."""
    value = config.get(key)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(f"{key} in config.json must be a whole number from {low} to {high}: got {shown(value)}")
    return value


def read_number(config: dict[str, Any], key: str, default: Any = _REQUIRED, *, high: float = 1e18) -> Any:
    """Read a number above 0 that fits 64 bits; `default`, which may be None, if it is absent or null."""
    value = config.get(key)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= high:
        raise UserError(f"{key} in config.json must be a number above 0, at most {high:g}: got {shown(value)}")
    return float(value)


def read_flag(config: dict[str, Any], key: str, default: bool = False) -> bool:
    """Read true or false; `default` if it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{key} in config.json must be true or false: got {shown(value)}")
    return value


def read_mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Read a mapping; empty if it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{key} in config.json must be a mapping: got {shown(value)}")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """Read the `config.json` of a model directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"no config.json in {directory}: model.path must be a Hugging Face model directory")
    return read_json_object(path)


def read_decoder(
    config: dict[str, Any],
    *,
    required: Sequence[str] = ("num_key_value_heads",),
    refused: Sequence[str] = ("attention_bias", "mlp_bias"),
    rope_types: Sequence[str] = ("default", "linear", "llama3"),
    rotary_fraction: float | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    hidden_act: str = "silu",
) -> ModelSpec:
    """Read a decoder without experts, biases, windows or norms of queries and keys; a family adds its own features.

    Args:
        required: keys that must be present besides the sizes.
        refused: keys that must be absent or false.
        rope_types: RoPE variants of the family.
        rotary_fraction: usual share of a head that RoPE rotates; None if it is always the whole head.
        head_dim: size of a head if `head_dim` is absent; None for hidden size / heads.
        norm_eps: epsilon of norms if `rms_norm_eps` is absent.
        rope_theta: base of RoPE if `rope_theta` is absent.
        hidden_act: activation of the family.
    """
    family = config["model_type"]
    if config.get("hidden_act", hidden_act) != hidden_act:
        raise UserError(f"hidden_act must be {hidden_act!r} for {family}: got {config['hidden_act']!r}")
    for key in refused:
        if read_flag(config, key):
            raise UserError(f"{key}: true is not supported for {family} (the models of the family do not use it)")
    if absent := [key for key in (*SIZES, *required) if config.get(key) is None]:
        raise UserError(f"config.json of a {family} model must have {', '.join(absent)}")
    rope = read_rope(config, rope_types, rotary_fraction, rope_theta)
    hidden, heads = read_whole(config, "hidden_size"), read_whole(config, "num_attention_heads")
    kv_heads = read_whole(config, "num_key_value_heads", heads)
    size = read_whole(config, "head_dim", head_dim or hidden // heads)
    if heads % kv_heads:
        raise UserError(f"num_attention_heads must be a multiple of num_key_value_heads: got {heads} and {kv_heads}")
    if size * rope.fraction % 2 or not size:
        raise UserError(
            f"RoPE turns pairs, so the part of a head that it turns must be even: got {size} x {rope.fraction:g} of "
            f"hidden_size {hidden} and {heads} heads"
        )
    return ModelSpec(
        family=str(family),
        layers=read_whole(config, "num_hidden_layers", high=MOST_LAYERS),
        hidden=hidden,
        ffn=read_whole(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        vocab=read_whole(config, "vocab_size"),
        max_positions=read_whole(config, "max_position_embeddings"),
        norm_eps=read_number(config, "rms_norm_eps", norm_eps, high=1),
        rope_theta=rope.theta,
        rope_linear_factor=rope.linear_factor,
        rope_llama3_factor=rope.llama3_factor,
        sliding_window=None,
        qkv_bias=False,
        qk_norm=False,
        tied=read_flag(config, "tie_word_embeddings"),
        rotary_fraction=rope.fraction,
        yarn=rope.yarn,
        mtp_layers=read_whole(config, "num_nextn_predict_layers", 0, low=0, high=MOST_LAYERS),
    )


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a model."""

    theta: float
    fraction: float = 1.0
    linear_factor: float | None = None
    llama3_factor: float | None = None
    yarn: YarnSpec | None = None


def read_rope(config: dict[str, Any], types: Sequence[str], usual_fraction: float | None, usual_theta: float) -> Rope:
    """Read RoPE in the spelling of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`)."""
    family = config["model_type"]
    rope = _read_rope_keys(config)
    theta = read_number(rope, "rope_theta") if "rope_theta" in rope else read_number(config, "rope_theta", usual_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    fraction = read_number(rope, "partial_rotary_factor", None, high=1) or read_number(
        config, "partial_rotary_factor", usual_fraction or 1.0, high=1
    )
    if fraction != 1.0 and usual_fraction is None:
        raise UserError(f"partial_rotary_factor must be 1 for {family}: got {fraction}")
    if kind not in types:
        raise UserError(f"RoPE variant {kind!r} is not supported for {family}; supported: {', '.join(types)}")
    if kind == "linear":
        return Rope(theta, fraction, linear_factor=read_number(rope, "factor"))
    if kind == "llama3":
        for key, fixed in LLAMA3_FIXED.items():
            if rope.get(key, fixed) != fixed:
                raise UserError(f"llama3 RoPE scaling is supported with {key}={fixed:g} only: got {shown(rope[key])}")
        return Rope(theta, fraction, llama3_factor=read_number(rope, "factor"))
    if kind == "yarn":
        return Rope(theta, fraction, yarn=_read_yarn(rope, config))
    return Rope(theta, fraction)


def _read_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Read the keys of RoPE; raises ValueError if both mappings exist and differ, because transformers would use the older
    one."""
    older, newer = read_mapping(config, "rope_scaling"), read_mapping(config, "rope_parameters")
    for name, rope in (("rope_scaling", older), ("rope_parameters", newer)):
        if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
            raise UserError(f"{name} in config.json must be the same for all layers: got {shown(nested)} in it")
    usual = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    both = [{**usual, **rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))} for rope in (older, newer)]
    for rope in both:
        rope.pop("type", None)
    if older and newer and both[0] != both[1]:
        raise UserError(
            "rope_scaling and rope_parameters in config.json must say the same, transformers takes the first of them: got "
            f"{shown(older)} and {shown(newer)}; remove one of them"
        )
    return older or newer


def _read_yarn(rope: dict[str, Any], config: dict[str, Any]) -> YarnSpec:
    if rope.get("attention_factor") is not None or not read_flag(rope, "truncate", True):
        raise UserError("yarn RoPE scaling is supported without attention_factor and with truncate: true only")
    if rope.get("factor") is None or not rope.get("mscale") or not rope.get("mscale_all_dim"):
        raise UserError(f"yarn RoPE scaling of a {config['model_type']} model must have factor, mscale and mscale_all_dim")
    return YarnSpec(
        factor=read_number(rope, "factor"),
        original_positions=read_whole(rope, "original_max_position_embeddings", config["max_position_embeddings"]),
        beta_fast=read_number(rope, "beta_fast", 32.0),
        beta_slow=read_number(rope, "beta_slow", 1.0),
        mscale=read_number(rope, "mscale"),
        mscale_all_dim=read_number(rope, "mscale_all_dim"),
    )


def read_optional_window(config: dict[str, Any]) -> int | None:
    """Read the sliding window that `use_sliding_window` enables (default: off); all layers or none must have it."""
    layers = read_whole(config, "num_hidden_layers", high=MOST_LAYERS)
    window = read_window(config) if read_flag(config, "use_sliding_window") else None
    if window is None:
        return None
    first = read_whole(config, "max_window_layers", 28, low=0)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f"layer_types in config.json must name the kind of each of {layers} layers: got {shown(kinds)}")
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise UserError(
            f"a mixture of attention kinds over the layers is not supported: {kinds.count('sliding_attention')} of "
            f"{len(kinds)} layers have a sliding window; set use_sliding_window to false in config.json to train without"
        )
    return window


def read_window(config: dict[str, Any], usual: int | None = 4096) -> int | None:
    """Read `sliding_window`: null means no window, and `usual` applies if the key is absent."""
    window: int | None = read_whole(config, "sliding_window", None if "sliding_window" in config else usual)
    return window


def refuse_optional_window(config: dict[str, Any]) -> None:
    """Raise ValueError if `use_sliding_window` turns a window on."""
    if read_flag(config, "use_sliding_window") and read_window(config) is not None:
        raise UserError(
            f"use_sliding_window: true is not supported for {config['model_type']}; the published models have it off"
        )


def read_expert_counts(config: dict[str, Any]) -> tuple[int, int]:
    """Read (experts per layer, experts per token)."""
    names = [name for name in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(name) is not None]
    if not names:
        raise UserError(f"config.json of a {config['model_type']} model must have the number of experts")
    count, top_k = read_whole(config, names[0], high=MOST_EXPERTS), read_whole(config, "num_experts_per_tok")
    if read_whole(config, "num_hidden_layers", high=MOST_LAYERS) * count > MOST_EXPERTS:
        raise UserError(f"config.json must have at most {MOST_EXPERTS} experts in all layers: got {count} in each")
    if top_k > count:
        raise UserError(f"num_experts_per_tok must lie between 1 and the {count} experts: got {top_k}")
    return count, top_k


def read_softmax_experts(config: dict[str, Any], shared_ffn: int = 0) -> MoESpec:
    """Read experts as in Qwen: softmax scores; `decoder_sparse_step` and `mlp_only_layers` select the layers."""
    count, top_k = read_expert_counts(config)
    dense, every = config.get("mlp_only_layers") or [], read_whole(config, "decoder_sparse_step", 1)
    layers = read_whole(config, "num_hidden_layers", high=MOST_LAYERS)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UserError(f"mlp_only_layers in config.json must be a list of layers: got {shown(dense)}")
    return MoESpec(
        count,
        top_k,
        read_whole(config, "moe_intermediate_size"),
        tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers)),
        shared_ffn,
        shared_gate=bool(shared_ffn),
        normalize=read_flag(config, "norm_topk_prob"),
        balance_coef=read_balance_coef(config),
    )


def read_balance_coef(config: dict[str, Any]) -> float:
    """Read the coefficient of the routers' balance loss, which may be 0; transformers' 0.001 if left out."""
    return 0.0 if config.get("router_aux_loss_coef") == 0 else read_number(config, "router_aux_loss_coef", 0.001)


def read_sigmoid_experts(
    config: dict[str, Any], *, n_group: int, topk_group: int, dense_layers: int, routed_scaling_factor: float
) -> MoESpec:
    """Read experts as in DeepSeek-V3: sigmoid scores, groups, a correction bias, shared experts, dense first layers.

    The arguments are the family's defaults for keys without a value in config.json.
    """
    family = config["model_type"]
    count, top_k = read_expert_counts(config)
    groups, groups_chosen = read_whole(config, "n_group", n_group), read_whole(config, "topk_group", topk_group)
    if count % groups or groups_chosen > groups or (groups > 1 and top_k % groups_chosen):
        raise UserError(
            f"experts must divide into n_group groups of which topk_group are chosen, and num_experts_per_tok must be a "
            f"multiple of topk_group: got {count} experts, n_group {groups}, topk_group {groups_chosen}, {top_k} of a token"
        )
    if groups > 1 and top_k // groups_chosen != 2:
        raise UserError(
            f"groups of experts are scored by their two best (DeepSeek-V3), which Megatron-Core does only where "
            f"num_experts_per_tok / topk_group is 2: got {top_k} / {groups_chosen}"
        )
    if top_k < 2:
        raise UserError(
            f"num_experts_per_tok must be at least 2 for {family}: Megatron-Core does not normalize a single score"
        )
    if not read_flag(config, "norm_topk_prob", True):
        raise UserError(
            f"norm_topk_prob: false is not supported for {family}: Megatron-Core always normalizes sigmoid scores"
        )
    dense, ffn = (
        read_whole(config, "first_k_dense_replace", dense_layers, low=0),
        read_whole(config, "moe_intermediate_size"),
    )
    layers = read_whole(config, "num_hidden_layers", high=MOST_LAYERS)
    return MoESpec(
        count,
        top_k,
        ffn,
        tuple(layer >= dense for layer in range(layers)),
        shared_ffn=read_whole(config, "n_shared_experts", 0 if "n_shared_experts" in config else 1, low=0) * ffn,
        sigmoid=True,
        n_group=groups,
        topk_group=groups_chosen,
        routed_scaling_factor=read_number(config, "routed_scaling_factor", routed_scaling_factor),
    )
