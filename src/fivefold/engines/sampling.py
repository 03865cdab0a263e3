"""Random draws of tokens as a function of (seed, step, prompt, sample, position): the same on every layout and device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _mix(number: int) -> int:
    """The output function of splitmix64 (Steele et al., OOPSLA 2014)."""
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def request_seed(parts: Iterable[int]) -> int:
    """64-bit key of one sampled sequence, as a signed number that a tensor can hold."""
    key = 0
    for part in parts:
        key = _mix((key + _GOLDEN + (part & _MASK)) & _MASK)
    return _signed(key)


def uniform(keys_N: Tensor, position: int) -> Tensor:
    """A float64 in [0, 1) for each key at this position."""
    z = keys_N + _signed(((position + 1) * _GOLDEN) & _MASK)
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift of 64-bit integers."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def sample_token(
    logits_NV: Tensor, uniform_N: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """(token, its log-prob) of each row; temperature 0 takes the most likely token.

    The log-prob is that of the whole distribution at this temperature, before top-p and top-k cut it, because that is
    what the trainer computes.
    """
    scaled = logits_NV.float()
    if temperature > 0:
        scaled = scaled / temperature
    logprobs_NV = torch.log_softmax(scaled, -1)
    if temperature == 0:
        token_N = logprobs_NV.argmax(-1)
    elif top_p >= 1 and not 0 < top_k < logits_NV.shape[1]:
        token_N = inverse_cdf(logprobs_NV.exp(), uniform_N)
    else:
        p_NV, order_NV = torch.sort(logprobs_NV.exp(), dim=-1, descending=True, stable=True)
        before_NV = p_NV.double().cumsum(-1) - p_NV
        keep_NV = before_NV < top_p
        keep_NV[:, 0] = True
        if top_k > 0:
            keep_NV[:, top_k:] = False
        token_N = order_NV.gather(1, inverse_cdf(p_NV * keep_NV, uniform_N)[:, None])[:, 0]
    return token_N, logprobs_NV.gather(1, token_N[:, None])[:, 0]


def inverse_cdf(p_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first entry at which the cumulative sum passes uniform · total; entries of probability 0 are never taken."""
    total_NV = p_NV.double().cumsum(-1)
    target_N = uniform_N * total_NV[:, -1]
    return torch.searchsorted(total_NV, target_N[:, None], right=True)[:, 0].clamp(max=p_NV.shape[1] - 1)
