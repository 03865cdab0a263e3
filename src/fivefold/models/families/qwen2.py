"""Qwen2 and Qwen2.5: Llama's layers with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder, read_optional_window
from fivefold.models.family import Family
from fivefold.models.parameters import decoder
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    spec = read_decoder(config, refused=("mlp_bias",))
    return replace(spec, qkv_bias=True, sliding_window=read_optional_window(config))


FAMILY = Family("qwen2", _read, decoder)
