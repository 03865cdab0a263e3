"""Mixtral: Mistral's layers, all with experts, which its files name w1, w3 and w2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.errors import UserError
from fivefold.models.config_json import read_balance_coef, read_decoder, read_expert_counts, read_window
from fivefold.models.family import Family
from fivefold.models.parameters import Table, decoder, experts
from fivefold.models.spec import ModelSpec, MoESpec


def _read(config: dict[str, Any]) -> ModelSpec:
    spec = read_decoder(config, required=("num_key_value_heads", "num_experts_per_tok"), norm_eps=1e-5, rope_theta=1e6)
    count, top_k = read_expert_counts(config)
    if config.get("router_jitter_noise"):
        raise UserError(f"router_jitter_noise must be 0: log-probs would be random; got {config['router_jitter_noise']}")
    return replace(
        spec,
        sliding_window=read_window(config, None),
        moe=MoESpec(count, top_k, spec.ffn, (True,) * spec.layers, balance_coef=read_balance_coef(config)),
    )


def _table(spec: ModelSpec) -> Table:
    return decoder(spec, *experts("block_sparse_moe", "w1", "w3", "w2"))


FAMILY = Family("mixtral", _read, _table)
