"""Llama 2 and 3: grouped-query attention without biases, a gated MLP, linear or llama3 RoPE scaling."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.models.config_json import read_decoder
from fivefold.models.family import Family
from fivefold.models.parameters import decoder
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    # The first Llamas have no num_key_value_heads: it equals the number of heads.
    spec = read_decoder(config, required=())
    if spec.hidden % spec.heads:
        # transformers refuses others, even with a head_dim of their own.
        raise UserError(f"hidden_size must be a multiple of num_attention_heads: got {spec.hidden} and {spec.heads}")
    return spec


FAMILY = Family("llama", _read, decoder)
