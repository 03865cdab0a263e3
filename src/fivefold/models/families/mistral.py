"""Mistral: Llama's layers, with a sliding window in all of them or in none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder, read_window
from fivefold.models.family import Family
from fivefold.models.parameters import decoder
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    return replace(read_decoder(config), sliding_window=read_window(config))


FAMILY = Family("mistral", _read, decoder)
