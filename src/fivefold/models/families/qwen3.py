"""Qwen3: Llama's layers with norms of queries and keys, and an independent head size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder, read_optional_window
from fivefold.models.family import Family
from fivefold.models.parameters import decoder
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    return replace(read_decoder(config, head_dim=128), qk_norm=True, sliding_window=read_optional_window(config))


FAMILY = Family("qwen3", _read, decoder)
