"""SwiGLU in one pass each way, optionally times a weight per token: silu(gate) · up · weight.

Gate and up are the halves of one product [T, 2 F], or two products [T, F].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of elements of a token that are read at once."""


@triton.jit
def _swiglu(gates, ups, weights, output, stride, width, weighted: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gates + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if weighted:
        value *= tl.load(weights + token).to(tl.float32)
    tl.store(output + token * width + column, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_back(
    gates, ups, weights, of_output, of_gates, of_ups, of_weights, stride, width, weighted: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    begin = token * stride
    weight = 1.0
    if weighted:
        weight = tl.load(weights + token).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        gate = tl.load(gates + begin + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(ups + begin + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(of_output + token * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        if weighted:
            total += g * silu * up
        g *= weight
        of_gate = g * up * (share + silu * (1.0 - share))
        tl.store(of_gates + begin + column, of_gate.to(of_gates.dtype.element_ty), mask=inside)
        tl.store(of_ups + begin + column, (g * silu).to(of_ups.dtype.element_ty), mask=inside)
    if weighted:
        tl.store(of_weights + token, tl.sum(total, 0).to(of_weights.dtype.element_ty))


def _forward(gates: Tensor, ups: Tensor, weights: Tensor | None, stride: int) -> Tensor:
    """Return [… , F]; rows of gates and of ups begin every `stride` elements.

    It is not read from the tensors, because the stride of a dimension of size 1 can be any number.
    """
    output = gates.new_empty(gates.shape)
    width = gates.shape[-1]
    if tokens := output.numel() // max(1, width):
        grid = (tokens, triton.cdiv(width, BLOCK))
        _swiglu[grid](gates, ups, weights, output, stride, width, weights is not None, block=BLOCK, num_warps=4)
    return output


def _backward(
    saved: tuple[Tensor, Tensor, Tensor | None],
    of_output: Tensor,
    of_gates: Tensor,
    of_ups: Tensor,
    of_weights: Tensor | None,
    stride: int,
) -> None:
    """Write the gradients, whose rows lie as those of gates and ups."""
    gates, ups, weights = saved
    width = gates.shape[-1]
    if tokens := gates.numel() // max(1, width):
        arguments = (gates, ups, weights, of_output.contiguous(), of_gates, of_ups, of_weights, stride, width)
        _swiglu_back[(tokens,)](*arguments, weights is not None, block=BLOCK, num_warps=4)


class _OfHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, weights: Tensor | None) -> Tensor:
        product = product.contiguous()
        ctx.save_for_backward(product, weights)
        gates, ups = product.chunk(2, -1)
        return _forward(gates, ups, weights, product.shape[-1])

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor, Tensor | None]:
        product, weights = ctx.saved_tensors
        of_product = torch.empty_like(product)
        of_weights = None if weights is None else torch.empty_like(weights)
        gates, ups = product.chunk(2, -1)
        of_gates, of_ups = of_product.chunk(2, -1)
        _backward((gates, ups, weights), of_output, of_gates, of_ups, of_weights, product.shape[-1])
        return of_product, of_weights


class _OfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _forward(gate, up, None, gate.shape[-1])

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        _backward((gate, up, None), of_output, of_gate, of_up, None, gate.shape[-1])
        return of_gate, of_up


def swiglu(product: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """[… , F] SwiGLU of [… , 2 F], in which the gate comes before what it gates (Shazeer 2020, eq. 6)."""
    output: Tensor = _OfHalves.apply(product, None if weights_T is None else weights_T.contiguous())
    return output


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """[… , F] SwiGLU of a gate [… , F] and what it gates (Shazeer 2020, eq. 6)."""
    output: Tensor = _OfTwo.apply(gate, up)
    return output
