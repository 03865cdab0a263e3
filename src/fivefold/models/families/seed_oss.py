"""Seed-OSS: Llama's layers with biases of queries, keys and values, and an independent head size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder, read_flag
from fivefold.models.family import Family
from fivefold.models.parameters import decoder
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    spec = read_decoder(config, required=("num_key_value_heads", "head_dim"), refused=("attention_out_bias", "mlp_bias"))
    return replace(spec, qkv_bias=read_flag(config, "attention_bias", True))


FAMILY = Family("seed_oss", _read, decoder)
