"""Families without a table that Megatron-Core's layers compute through Megatron-Bridge: config.json -> ModelSpec. No torch.

Sizes and RoPE are read here, the kinds of layers come from Megatron-Bridge when the model is built
(`megatron/bridge/provider.py`). A family is added with a reader, and a variant in tests/megatron/test_bridged_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fivefold.errors import UserError
from fivefold.models.config_json import read_decoder, read_flag
from fivefold.models.config_keys import check_keys
from fivefold.models.spec import ModelSpec

_GELU = "gelu_pytorch_tanh"


def _nemotron(config: dict[str, Any]) -> ModelSpec:
    named = {**config, "rms_norm_eps": config.get("norm_eps")}
    return read_decoder(named, required=(), rope_types=("default",), rotary_fraction=0.5, norm_eps=1e-5, hidden_act="relu2")


def _gemma(config: dict[str, Any]) -> ModelSpec:
    # The first releases write gelu and mean its approximation by tanh, as transformers reads it too.
    named = {**config, "hidden_act": _GELU} if config.get("hidden_act") == "gelu" else config
    if config.get("hidden_activation", _GELU) not in (_GELU, None):
        raise UserError(f"hidden_activation must be {_GELU!r} or null for gemma: got {config['hidden_activation']!r}")
    if not read_flag(config, "tie_word_embeddings", True):
        raise UserError("tie_word_embeddings must be true for gemma: Megatron-Bridge has no output layer of its own for it")
    spec = read_decoder(
        named,
        refused=("attention_bias", "use_bidirectional_attention"),
        rope_types=("default",),
        head_dim=256,
        hidden_act=_GELU,
    )
    return replace(spec, tied=True)


READERS: dict[str, Callable[[dict[str, Any]], ModelSpec]] = {"nemotron": _nemotron, "gemma": _gemma}
"""Family (`model_type`) -> reader of config.json, which raises UserError for what the layers do not compute."""
_LACKS = {
    "gemma2": "soft caps and windows in every second layer",
    "gemma3_text": "windows in most layers, with another RoPE",
    "gpt_oss": "attention sinks and windows in every second layer",
    "olmoe": "norms across all heads of queries and keys",
    "nemotron_h": "Mamba layers",
    "qwen3_next": "layers of linear attention",
    "ministral3": "attention whose scale grows with the position",
}
"""Family that Megatron-Bridge converts -> what its layers, which need Transformer Engine, have and ours do not."""


def as_bridged(spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a stored model for Megatron-Core's layers, or the given one with why there is none."""
    reader = READERS.get(spec.family)
    if reader is None:
        lacks = f"; it has {_LACKS[spec.family]}, which our layers do not compute" if spec.family in _LACKS else ""
        unknown = f"unknown model family {spec.family!r} (model_type in config.json)"
        return for_fsdp_only(spec, f"{unknown}: megatron: layouts have no table of it{lacks}")
    try:
        bridged = reader(config)
        check_keys(config, bridged)
    except UserError as error:
        return for_fsdp_only(spec, f"megatron: layouts cannot compute this {spec.family} model: {error}")
    return replace(bridged, stored=spec.stored, mtp_layers=0)


def for_fsdp_only(spec: ModelSpec, why: str) -> ModelSpec:
    """Return the spec of a stored model that `megatron:` layouts refuse; a reason that it has already stays."""
    assert spec.stored is not None
    return replace(spec, stored=replace(spec.stored, only_fsdp=spec.only_fsdp or why))
