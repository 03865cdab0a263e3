"""Converts a `Sampling` to vLLM's SamplingParams. No vLLM here: a server receives them as JSON."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from typing import Any

from fivefold.types import Sampling

TAG = "fivefold"
"""Name of a request in `SamplingParams.extra_args`: the workers collect the log-probs of one that has it."""
_MOST_SEED = (1 << 63) - 1


def seed_of(seed: int) -> int:
    """Returns a request's seed, reduced to vLLM's range."""
    return seed & _MOST_SEED


def sampling_arguments(sampling: Sampling, ends: Collection[int]) -> dict[str, Any]:
    """Returns all parameters but the seed. End tokens are listed one by one, so that all engines end at the same tokens."""
    return {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "ignore_eos": True,
        "stop_token_ids": sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else ends)}),
        "stop": list(sampling.stop) or None,
        "include_stop_str_in_output": True,
        "detokenize": bool(sampling.stop),
        "logprobs": 0 if sampling.logprobs else None,
        "flat_logprobs": True,
    }


def copied(params: Any, name: str | None, seed: int) -> Any:
    """Returns vLLM's parameters of one request; those of others that it was made from share what is in them.

    `name`: the request's, if workers collect its log-probs. vLLM's own copies of all parts take longer than the rest of its
    work for a request; it changes them alike for all requests.
    """
    one = copy(params)
    if hasattr(one, "skip_clone"):
        one.skip_clone = True
    one.seed = seed_of(seed)
    if name is not None:
        one.extra_args = {TAG: name}
    return one


def without_vllms_logprobs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters that do not ask vLLM for log-probs, where the workers hand over those of drawn tokens."""
    return arguments if arguments["temperature"] == 0 else {**arguments, "logprobs": None}
