"""Mistral: Llama's layers, with a sliding window in all of them or in none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder
from fivefold.models.family import Family
from fivefold.models.parameters import decoder
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    window = config.get("sliding_window", 4096)
    return replace(read_decoder(config), sliding_window=None if window is None else int(window))


FAMILY = Family("mistral", _read, decoder)
