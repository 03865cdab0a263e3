"""Qwen2 and Qwen2.5: Llama's layers with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.errors import UserError
from fivefold.models.config_json import read_decoder, read_flag, read_optional_window
from fivefold.models.family import Family
from fivefold.models.parameters import decoder
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    # transformers does not read the key, which MiMo's files have: these biases are always there.
    if not read_flag(config, "attention_bias", True):
        raise UserError(f"attention_bias: false is not supported for {config['model_type']}: transformers computes biases")
    spec = read_decoder(config, refused=("mlp_bias",))
    return replace(spec, qkv_bias=True, sliding_window=read_optional_window(config))


FAMILY = Family("qwen2", _read, decoder)
