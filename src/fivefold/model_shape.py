"""What a Hugging Face `config.json` says of a model: directory -> ModelShape. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.layout import ParallelLayout

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this on every layout, so that a checkpoint does not depend on tp."""

LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core's llama3 RoPE has these numbers built in; a model with others would be computed wrongly."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and choices of a decoder-only transformer that decide its parameters and its mathematics."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_linear_factor: float | None
    """Positions are divided by this (linear RoPE scaling), or None."""
    rope_llama3_factor: float | None
    """`factor` of llama3 RoPE scaling, or None."""
    sliding_window: int | None
    """Tokens a query sees, itself included, or None for all before it."""
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """The output layer shares the embedding's weight."""

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q * self.hidden
        bias = q + 2 * kv if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return attention + bias + 3 * self.hidden * self.ffn + norms

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + embeddings

    def check_layout(self, layout: ParallelLayout) -> None:
        """Raise ValueError where this model cannot be cut the way `layout` asks."""
        for what, size in (("attention heads", self.heads), ("key/value heads", self.kv_heads), ("ffn size", self.ffn)):
            if size % layout.tp:
                raise ValueError(
                    f"{what} must be divisible by tp: got {size} for tp={layout.tp} in {layout}; "
                    f"choose a tp that divides {size}"
                )
        if VOCABULARY_MULTIPLE % layout.tp:
            raise ValueError(
                f"tp must divide {VOCABULARY_MULTIPLE} (the vocabulary of {self.vocab} is padded to {self.padded_vocab}): "
                f"got tp={layout.tp} in {layout}; choose a power of two"
            )
        if self.layers % layout.pp:
            raise ValueError(
                f"layers must be divisible by pp: got {self.layers} layers for pp={layout.pp} in {layout}; "
                f"choose a pp that divides {self.layers}"
            )


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a model directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {directory}: model.path must be a Hugging Face model directory")
    loaded = json.loads(path.read_text())
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return loaded


def load_shape(directory: str | Path) -> ModelShape:
    """ModelShape of a Hugging Face model directory; raises ValueError for what is not supported, by its name."""
    return shape_from_config(read_config(Path(directory)))


def shape_from_config(config: dict[str, Any]) -> ModelShape:
    """ModelShape of a parsed `config.json`; both transformers 4 and 5 spellings of RoPE are read."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"unknown model family {family!r} (model_type in config.json); supported: {', '.join(FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu' for {family}: got {config['hidden_act']!r}")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{key}: true is not supported for {family} (the models of the family do not use it)")
    needed = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
    needed += ["max_position_embeddings"] + ([] if family == "llama" else ["num_key_value_heads"])
    if absent := [key for key in needed if config.get(key) is None]:
        raise ValueError(f"config.json of a {family} model must have {', '.join(absent)}")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    theta, linear, llama3 = _rope(config)
    return ModelShape(
        family=str(family),
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        ffn=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
        vocab=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_linear_factor=linear,
        rope_llama3_factor=llama3,
        sliding_window=_sliding_window(config),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _rope(config: dict[str, Any]) -> tuple[float, float | None, float | None]:
    """(theta, linear factor, llama3 factor)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1: got {partial}")
    if kind == "default":
        return theta, None, None
    if kind == "linear":
        return theta, float(rope["factor"]), None
    if kind == "llama3":
        for key, fixed in LLAMA3_FIXED.items():
            if float(rope.get(key, fixed)) != fixed:
                raise ValueError(f"llama3 RoPE scaling is supported with {key}={fixed:g} only: got {rope[key]}")
        return theta, None, float(rope["factor"])
    raise ValueError(f"RoPE variant {kind!r} is not supported; supported: default, linear, llama3")


def _sliding_window(config: dict[str, Any]) -> int | None:
    family, layers = config["model_type"], int(config["num_hidden_layers"])
    if family == "llama":
        return None
    if family == "mistral":
        window = config.get("sliding_window", 4096)
        return None if window is None else int(window)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if window is None:
        return None
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= int(config.get("max_window_layers", 28)) else "full_attention"
        for layer in range(layers)
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ValueError(
            f"a mixture of attention kinds over the layers is not supported: {kinds.count('sliding_attention')} of "
            f"{len(kinds)} layers have a sliding window; set use_sliding_window to false in config.json to train without"
        )
    return int(window)
