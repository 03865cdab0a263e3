"""Causal attention inside each packed sequence, in plain PyTorch: query, key, value [T, H, D] -> [T, H, D]."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fivefold.backend.kernels import flash
from fivefold.backend.packing import Packing

_GROUPED_QUERY = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether varlen_attn of the installed torch supports fewer key/value heads than query heads."""


class _Gather(torch.autograd.Function):
    """Select rows by index; gradients of a row that several pieces have as a key are summed in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        summed = grad.new_zeros(ctx.rows, *grad.shape[1:], dtype=torch.float32).index_add_(0, index, grad.float())
        return summed.to(grad.dtype), None


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows at `index`, some of which may be there several times."""
    taken: Tensor = _Gather.apply(rows, index)
    return taken


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    window: int | None,
    scale: float,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute attention of this rank's queries to the gathered keys; each query sees at most `window` tokens with itself.

    `cap` bounds the scores to cap · tanh(score / cap) (Gemma 2, 2408.00118, section 2). `sinks_H` are logits that take part
    in each head's softmax without a value (gpt-oss).
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    if cap is not None or sinks_H is not None or not (query.is_cuda and half and query.shape[2] % 8 == 0):
        is_plain = cap is None and sinks_H is None
        attended = partial(_dense, scale=scale) if is_plain else partial(_explicit, scale=scale, cap=cap, sinks_H=sinks_H)
        return _padded(query, key, value, packing, window, attended)
    if packing.key_index is not None:
        key, value = (take_rows(tensor, packing.key_index) for tensor in (key, value))
    assert packing.cu_queries is not None and packing.cu_keys is not None
    if flash.takes(query, value):
        ends, most = (packing.cu_queries, packing.cu_keys), (packing.most_queries, packing.most_keys)
        return flash.attention(query, key, value, ends, most, None if window is None else window - 1, scale)
    return _varlen(query, key, value, packing, window, scale)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, window: int | None, scale: float) -> Tensor:
    """Compute attention with PyTorch's variable-length flash attention; a piece's queries are the last of its keys."""
    if not _GROUPED_QUERY and query.shape[1] != key.shape[1]:
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    width = value.shape[2]
    if width < key.shape[2]:
        value = F.pad(value, (0, key.shape[2] - width))
    options: dict[str, Any] = {"enable_gqa": True} if _GROUPED_QUERY else {}
    assert packing.cu_queries is not None and packing.cu_keys is not None
    left = -1 if window is None else window - 1
    output = varlen_attn(
        query,
        key,
        value,
        packing.cu_queries,
        packing.cu_keys,
        packing.most_queries,
        packing.most_keys,
        window_size=(left, 0),
        scale=scale,
        **options,
    )
    assert isinstance(output, Tensor)
    return output[..., :width]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, window: int | None, attended: Callable[..., Tensor]
) -> Tensor:
    """Compute attention over pieces of similar length, padded on the right, by `attended(q, k, v, mask)`.

    Causality hides the padding from every token.
    """
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    for bucket in packing.buckets:
        inside = bucket.queries >= 0
        q = query[bucket.queries.clamp(min=0)].transpose(1, 2)
        k, v = (tensor[bucket.keys.clamp(min=0)].transpose(1, 2) for tensor in (key, value))
        mask = None
        if not bucket.is_whole or (window is not None and bucket.keys.shape[1] > window):
            before = (bucket.key_lengths - bucket.query_lengths)[:, None, None]
            place = torch.arange(bucket.queries.shape[1], device=query.device)[:, None] + before
            distance = place - torch.arange(bucket.keys.shape[1], device=query.device)
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
            # A padded query must see some key, or its softmax is NaN.
            mask = (mask | ~inside[:, :, None])[:, None]
        output = output.index_put((bucket.queries[inside],), attended(q, k, v, mask).transpose(1, 2)[inside])
    return output


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention [B, H, T, D] with PyTorch's kernels."""
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )  # fmt: skip


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None, sinks_H: Tensor | None
) -> Tensor:
    """Compute attention [B, H, T, D] with all scores in memory, which no kernel of PyTorch bounds or adds sinks to."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v
