"""Converts a `Sampling` to SGLang's sampling parameters. No SGLang here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fivefold.types import Sampling


def is_cut(sampling: Sampling) -> bool:
    """Returns whether tokens are drawn from a truncated distribution."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 0)


def sampling_arguments(sampling: Sampling, ends: Collection[int], seed: int) -> dict[str, Any]:
    """Returns SGLang's sampling parameters. End tokens are listed one by one, so that all engines end at the same tokens."""
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": [] if sampling.ignore_eos else sorted({*sampling.stop_token_ids, *ends}),
        "sampling_seed": seed & 0x7FFFFFFF,
    }
