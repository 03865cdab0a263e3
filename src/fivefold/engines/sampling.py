"""Random draws of tokens as a function of (seed, step, prompt, sample, position): the same on every layout and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fivefold.types import Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _mix(number: int) -> int:
    """Computes the output function of splitmix64 (Steele et al., OOPSLA 2014)."""
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def request_seed(parts: Iterable[int]) -> int:
    """Returns the 64-bit key of one sampled sequence, as a signed number that a tensor can hold."""
    key = 0
    for part in parts:
        key = _mix((key + _GOLDEN + (part & _MASK)) & _MASK)
    return _signed(key)


def uniform(keys_N: Tensor, position: int) -> Tensor:
    """Returns a float64 in [0, 1) for each key at this position."""
    z = keys_N + _signed(((position + 1) * _GOLDEN) & _MASK)
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, by: int) -> Tensor:
    """Shifts 64-bit integers to the right logically."""
    return (z >> by) & ((1 << (64 - by)) - 1)


class LogitsProcessor:
    """Applies a `Sampling` to the logits of rows that are decoded together, before tokens are drawn from them."""

    def __init__(
        self, sampling: Sampling, ends: Iterable[int], prompts: Sequence[Sequence[int]], vocab: int, device: torch.device
    ):
        """`ends`: tokens that end a response, which `min_tokens` masks; `prompts`: the prompts of the rows, for the
        repetition penalty."""
        self._sampling = sampling
        self._ends = torch.tensor(sorted(ends), dtype=torch.long, device=device)
        self._biased = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long, device=device)
        self._biases = torch.tensor([bias for _, bias in sampling.logit_bias], device=device)
        self._seen_NV: Tensor | None = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(prompts), vocab, dtype=torch.bool)
            for row, tokens in zip(seen, prompts, strict=True):
                row[list(tokens)] = True
            self._seen_NV = seen.to(device)

    def __call__(self, logits_NV: Tensor, position: int) -> Tensor:
        """Returns the logits from which the response's token at `position` is drawn, before the temperature."""
        logits_NV = logits_NV.float()
        sampling = self._sampling
        if sampling.logit_bias:
            logits_NV = logits_NV.index_add(1, self._biased, self._biases.expand(len(logits_NV), -1))
        if position < sampling.min_tokens and len(self._ends):
            logits_NV = logits_NV.index_fill(1, self._ends, float("-inf"))
        if self._seen_NV is not None:
            penalty = sampling.repetition_penalty
            weakened_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
            logits_NV = torch.where(self._seen_NV, weakened_NV, logits_NV)
        return logits_NV

    def add(self, token_N: Tensor) -> None:
        """Record the tokens that the rows have drawn."""
        if self._seen_NV is not None:
            self._seen_NV.scatter_(1, token_N[:, None], True)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        if self._seen_NV is not None:
            self._seen_NV = self._seen_NV[rows]


def sample_token(logits_NV: Tensor, uniform_N: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns (token, its log-prob) of each row; temperature 0 takes the most likely token.

    The log-prob is that of the distribution from which the token was drawn, after min-p, top-k and top-p in this order. At
    temperature 0 it is that of the logits themselves.
    """
    logits_NV = logits_NV.float()
    if sampling.temperature == 0:
        logprobs_NV = torch.log_softmax(logits_NV, -1)
        token_N = logprobs_NV.argmax(-1)
        return token_N, logprobs_NV.gather(1, token_N[:, None])[:, 0]
    logprobs_NV = torch.log_softmax(logits_NV / sampling.temperature, -1)
    is_cut = sampling.top_p < 1 or sampling.min_p > 0 or 0 < sampling.top_k < logits_NV.shape[1]
    if not is_cut:
        token_N = inverse_cdf(logprobs_NV.exp(), uniform_N)
        return token_N, logprobs_NV.gather(1, token_N[:, None])[:, 0]
    p_NV, order_NV = torch.sort(logprobs_NV.exp(), dim=-1, descending=True, stable=True)
    p_NV = p_NV.double()
    p_NV = p_NV * (p_NV >= sampling.min_p * p_NV[:, :1])
    if sampling.top_k > 0:
        p_NV[:, sampling.top_k :] = 0
    before_NV = p_NV.cumsum(-1) - p_NV
    # The most likely token is kept for any top_p: the sum before it is 0.
    p_NV = p_NV * (before_NV < sampling.top_p * p_NV.sum(-1, keepdim=True))
    place_N = inverse_cdf(p_NV, uniform_N)[:, None]
    logprob_N = (p_NV.gather(1, place_N)[:, 0] / p_NV.sum(-1)).log().float()
    return order_NV.gather(1, place_N)[:, 0], logprob_N


def inverse_cdf(p_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Returns the first entry at which the cumulative sum passes uniform · total; entries of probability 0 are never
    taken."""
    total_NV = p_NV.double().cumsum(-1)
    target_N = uniform_N * total_NV[:, -1]
    return torch.searchsorted(total_NV, target_N[:, None], right=True)[:, 0].clamp(max=p_NV.shape[1] - 1)
