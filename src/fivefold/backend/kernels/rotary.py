"""Splits the QKV product: [T, groups, heads + 2, D] -> queries and keys, normed and rotated, and values.

The heads of a group are adjacent: its queries, its key, its value. One program works on one token at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Number of a token's heads that one warp holds in registers: exchanging sums between warps takes three times as long."""
PROGRAMS = 4096
"""Number of backward programs: each sums the norm weights' gradient of its tokens, and these sums are added at the end."""


@triton.jit
def _heads(
    mixed, cosines, sines, q_weight, k_weight, query, key, value, groups, eps,
    heads: tl.constexpr, width: tl.constexpr, rotated: tl.constexpr, normed: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    inside = column < width
    turned = column < rotated
    half: tl.constexpr = rotated // 2
    partner = tl.where(column < half, column + half, tl.where(turned, column - half, column))
    cos = tl.load(cosines + token * rotated + column, mask=turned, other=1.0)
    sin = tl.load(sines + token * rotated + column, mask=turned, other=0.0) * tl.where(column < half, -1.0, 1.0)
    if normed:
        of_q, of_k = tl.load(q_weight + column, mask=inside, other=0.0), tl.load(k_weight + column, mask=inside, other=0.0)
        of_q, of_k = of_q.to(tl.float32), of_k.to(tl.float32)
        across_q = tl.load(q_weight + partner, mask=inside, other=0.0).to(tl.float32)
        across_k = tl.load(k_weight + partner, mask=inside, other=0.0).to(tl.float32)
    heads_of_group: tl.constexpr = heads + 2
    for first in range(0, groups * heads_of_group, rows):
        row = first + tl.arange(0, rows)
        is_row = row < groups * heads_of_group
        group, place = row // heads_of_group, row % heads_of_group
        is_query, is_key = is_row & (place < heads), is_row & (place == heads)
        begin = mixed + (token * groups * heads_of_group + row)[:, None] * width
        both = is_row[:, None] & inside[None, :]
        raw = tl.load(begin + column[None, :], mask=both, other=0.0)
        x = raw.to(tl.float32)
        across = tl.load(begin + partner[None, :], mask=both, other=0.0).to(tl.float32)
        if normed:
            inverse = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
            x = x * inverse * tl.where(is_key[:, None], of_k[None, :], of_q[None, :])
            across = across * inverse * tl.where(is_key[:, None], across_k[None, :], across_q[None, :])
        out = (x * cos[None, :] + across * sin[None, :]).to(raw.dtype)
        to_query = query + ((token * groups + group) * heads + place)[:, None] * width + column[None, :]
        to_group = ((token * groups + group) * width)[:, None] + column[None, :]
        tl.store(to_query, out, mask=is_query[:, None] & inside[None, :])
        tl.store(key + to_group, out, mask=is_key[:, None] & inside[None, :])
        tl.store(value + to_group, raw, mask=(is_row & (place > heads))[:, None] & inside[None, :])


@triton.jit
def _heads_back(
    mixed, cosines, sines, q_weight, k_weight, of_query, of_key, of_value, of_mixed, of_weights, tokens, programs,
    groups, eps,
    heads: tl.constexpr, width: tl.constexpr, rotated: tl.constexpr, normed: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, columns)
    inside = column < width
    turned = column < rotated
    half: tl.constexpr = rotated // 2
    partner = tl.where(column < half, column + half, tl.where(turned, column - half, column))
    heads_of_group: tl.constexpr = heads + 2
    sum_q = tl.zeros([columns], tl.float32)
    sum_k = tl.zeros([columns], tl.float32)
    if normed:
        of_q = tl.load(q_weight + column, mask=inside, other=0.0).to(tl.float32)
        of_k = tl.load(k_weight + column, mask=inside, other=0.0).to(tl.float32)
    for turn in range(0, (tokens - program + programs - 1) // programs):
        token = program.to(tl.int64) + turn * programs
        cos = tl.load(cosines + token * rotated + column, mask=turned, other=1.0)
        # The sine with which this number entered its partner's rotation.
        sin = tl.load(sines + token * rotated + partner, mask=turned, other=0.0) * tl.where(column < half, 1.0, -1.0)
        for first in range(0, groups * heads_of_group, rows):
            row = first + tl.arange(0, rows)
            is_row = row < groups * heads_of_group
            group, place = row // heads_of_group, row % heads_of_group
            is_query, is_key, is_value = is_row & (place < heads), is_row & (place == heads), is_row & (place > heads)
            from_query = ((token * groups + group) * heads + place)[:, None] * width
            from_group = ((token * groups + group) * width)[:, None]
            q_mask, k_mask = is_query[:, None] & inside[None, :], is_key[:, None] & inside[None, :]
            # A row is a query or a key, so one of the two is 0.
            g = tl.load(of_query + from_query + column[None, :], mask=q_mask, other=0.0).to(tl.float32)
            g += tl.load(of_key + from_group + column[None, :], mask=k_mask, other=0.0).to(tl.float32)
            across = tl.load(of_query + from_query + partner[None, :], mask=q_mask, other=0.0).to(tl.float32)
            across += tl.load(of_key + from_group + partner[None, :], mask=k_mask, other=0.0).to(tl.float32)
            g = g * cos[None, :] + across * sin[None, :]
            at = (token * groups * heads_of_group + row)[:, None] * width + column[None, :]
            both = is_row[:, None] & inside[None, :]
            if normed:
                x = tl.load(mixed + at, mask=both, other=0.0).to(tl.float32)
                inverse = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
                x = x * inverse
                sum_q += tl.sum(tl.where(is_query[:, None], g * x, 0.0), 0)
                sum_k += tl.sum(tl.where(is_key[:, None], g * x, 0.0), 0)
                g = g * tl.where(is_key[:, None], of_k[None, :], of_q[None, :])
                g = inverse * (g - x * (tl.sum(g * x, 1) / width)[:, None])
            g += tl.load(of_value + from_group + column[None, :], mask=is_value[:, None] & inside[None, :], other=0.0)
            tl.store(of_mixed + at, g.to(of_mixed.dtype.element_ty), mask=both)
    if normed:
        tl.store(of_weights + program * 2 * width + column, sum_q, mask=inside)
        tl.store(of_weights + (program * 2 + 1) * width + column, sum_k, mask=inside)


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        cosines: Tensor,
        sines: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        heads: int,
        width: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = mixed.contiguous()
        tokens = cosines.shape[0]
        groups = mixed.numel() // (tokens * (heads + 2) * width)
        query = mixed.new_empty(tokens, groups * heads, width)
        key, value = mixed.new_empty(2, tokens, groups, width).unbind(0)
        shape = {
            "heads": heads, "width": width, "rotated": cosines.shape[1], "normed": q_weight is not None,
            "columns": triton.next_power_of_2(width),
        }  # fmt: skip
        arguments = (mixed, cosines, sines, q_weight, k_weight, query, key, value, groups, eps)
        _heads[(tokens,)](*arguments, **shape, rows=ROWS, num_warps=1)
        ctx.save_for_backward(mixed, cosines, sines, q_weight, k_weight)
        ctx.shape, ctx.rest = shape, (groups, eps)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor, of_value: Tensor) -> tuple[Tensor | None, ...]:
        mixed, cosines, sines, q_weight, k_weight = ctx.saved_tensors
        tokens, width = cosines.shape[0], ctx.shape["width"]
        programs = min(tokens, PROGRAMS)
        of_mixed = torch.empty_like(mixed)
        of_weights = mixed.new_empty(programs, 2, width, dtype=torch.float32)
        gradients = (of_query.contiguous(), of_key.contiguous(), of_value.contiguous())
        arguments = (
            mixed,
            cosines,
            sines,
            q_weight,
            k_weight,
            *gradients,
            of_mixed,
            of_weights,
            tokens,
            programs,
            *ctx.rest,
        )
        _heads_back[(programs,)](*arguments, **ctx.shape, rows=ROWS, num_warps=1)
        if q_weight is None:
            return of_mixed, None, None, None, None, None, None, None
        of_q, of_k = of_weights.sum(0).to(q_weight.dtype).unbind(0)
        return of_mixed, None, None, of_q, of_k, None, None, None


def norm_rotate(
    mixed: Tensor,
    cosines_TR: Tensor,
    sines_TR: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    heads: int,
    width: int,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [T, groups · heads, D], key and value [T, groups, D] of `mixed`, [T, …] with `heads` queries a group.

    Queries and keys are divided by their root mean square and multiplied by the weights of `norms`. Then the first R of
    their D numbers are rotated by halves, as in RoFormer (Su et al. 2021, eq. 34).
    """
    q_weight, k_weight = norms or (None, None)
    rotated: tuple[Tensor, Tensor, Tensor] = _NormRotate.apply(
        mixed, cosines_TR.contiguous(), sines_TR.contiguous(), q_weight, k_weight, heads, width, eps
    )
    return rotated
