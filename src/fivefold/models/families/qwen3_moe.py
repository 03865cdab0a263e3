"""Qwen3 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.models.config_json import read_decoder, read_softmax_experts, refuse_optional_window
from fivefold.models.family import Family
from fivefold.models.parameters import Table, decoder, experts
from fivefold.models.spec import ModelSpec


def _read(config: dict[str, Any]) -> ModelSpec:
    spec = read_decoder(config, required=("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size"))
    refuse_optional_window(config)
    return replace(spec, qk_norm=True, moe=read_softmax_experts(config))


def _table(spec: ModelSpec) -> Table:
    return decoder(spec, *experts())


FAMILY = Family("qwen3_moe", _read, _table)
