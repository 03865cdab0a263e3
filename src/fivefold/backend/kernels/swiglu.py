"""SwiGLU of [T, 2 F] in one pass each way, optionally times a weight per token: silu(gate) · up · weight."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of elements of a token that are read at once."""


@triton.jit
def _swiglu(product, weights, output, width, weighted: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(product + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(product + token * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if weighted:
        value *= tl.load(weights + token).to(tl.float32)
    tl.store(output + token * width + column, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_back(product, weights, of_output, of_product, of_weights, width, weighted: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    begin = token * 2 * width
    weight = 1.0
    if weighted:
        weight = tl.load(weights + token).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        gate = tl.load(product + begin + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(product + begin + width + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(of_output + token * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        if weighted:
            total += g * silu * up
        g *= weight
        of_gate = g * up * (share + silu * (1.0 - share))
        kind = of_product.dtype.element_ty
        tl.store(of_product + begin + column, of_gate.to(kind), mask=inside)
        tl.store(of_product + begin + width + column, (g * silu).to(kind), mask=inside)
    if weighted:
        tl.store(of_weights + token, tl.sum(total, 0).to(of_weights.dtype.element_ty))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, weights: Tensor | None) -> Tensor:
        product = product.contiguous()
        width = product.shape[-1] // 2
        output = product.new_empty(*product.shape[:-1], width)
        tokens = output.numel() // max(1, width)
        if tokens:
            grid = (tokens, triton.cdiv(width, BLOCK))
            _swiglu[grid](product, weights, output, width, weights is not None, block=BLOCK, num_warps=4)
        ctx.save_for_backward(product, weights)
        return output

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor, Tensor | None]:
        product, weights = ctx.saved_tensors
        width = product.shape[-1] // 2
        of_product = torch.empty_like(product)
        of_weights = None if weights is None else torch.empty_like(weights)
        tokens = product.numel() // max(1, 2 * width)
        if tokens:
            arguments = (product, weights, of_output.contiguous(), of_product, of_weights, width, weights is not None)
            _swiglu_back[(tokens,)](*arguments, block=BLOCK, num_warps=4)
        return of_product, of_weights


def swiglu(product: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """[… , F] SwiGLU of [… , 2 F], in which the gate comes before what it gates (Shazeer 2020, eq. 6)."""
    output: Tensor = _SwiGLU.apply(product, None if weights_T is None else weights_T.contiguous())
    return output
