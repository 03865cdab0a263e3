"""One pass over float32 logits [rows, V]: the sums that the log-prob head needs of each row, and the gradient in place."""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Number of logits of a row that are read at once."""


@triton.jit
def _row_sums(logits, stride, targets, sums, rows, width, scale, block: tl.constexpr):
    row = tl.program_id(0)
    begin = logits + row.to(tl.int64) * stride
    offsets = tl.arange(0, block)
    # Each position of the block has its own maximum and sums, so that nothing is reduced inside the loop.
    largest = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    weighted = tl.zeros([block], tl.float32)
    for first in range(0, width, block):
        inside = first + offsets < width
        x = tl.load(begin + first + offsets, mask=inside, other=float("-inf")) * scale
        higher = tl.maximum(largest, x)
        # A position without values so far: exp(-inf - -inf) would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before = tl.exp(largest - shift)
        weight = tl.exp(x - shift)
        total = total * before + weight
        weighted = weighted * before + weight * tl.where(inside, x, 0.0)
        largest = higher
    top = tl.max(largest, 0)
    share = tl.exp(largest - top)
    target = tl.load(targets + row)
    is_inside = (target >= 0) & (target < width)
    picked = tl.load(begin + tl.where(is_inside, target, 0), mask=is_inside, other=0.0) * scale
    tl.store(sums + row, top)
    tl.store(sums + rows + row, tl.sum(total * share, 0))
    tl.store(sums + 2 * rows + row, tl.sum(weighted * share, 0))
    tl.store(sums + 3 * rows + row, picked)


@triton.jit
def _row_gradient(logits, stride, gradient, targets, log_sum, entropy, slope, spread, width, scale, block: tl.constexpr):
    row = tl.program_id(0)
    begin = logits + row.to(tl.int64) * stride
    # Elements of the gradient are half the size of the logits, or the same size.
    written = gradient + row.to(tl.int64) * stride * (4 // (gradient.dtype.element_ty.primitive_bitwidth // 8))
    offsets = tl.arange(0, block)
    target, norm, mean = tl.load(targets + row), tl.load(log_sum + row), tl.load(entropy + row)
    of_logprob, of_entropy = tl.load(slope + row), tl.load(spread + row)
    for first in range(0, width, block):
        inside = first + offsets < width
        log_p = tl.load(begin + first + offsets, mask=inside, other=0.0) * scale - norm
        # d logprob / d logit = [target] - p;  d entropy / d logit = -p (log p + entropy)
        slopes = -tl.exp(log_p) * (of_logprob + of_entropy * (log_p + mean))
        slopes += tl.where(first + offsets == target, of_logprob, 0.0)
        # The gradient overwrites the logits: the whole block must have been read.
        tl.debug_barrier()
        tl.store(written + first + offsets, (slopes * scale).to(gradient.dtype.element_ty), mask=inside)


RowTensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Values of each row of a product: log Σ exp of the logits, entropy, and the gradients of log-prob and entropy."""


def row_sums(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """[4, rows] of logits · `scale`: maximum, Σ exp, Σ exp · logit (exponents relative to it), target's logit or 0."""
    rows, width = logits.shape
    sums = torch.empty(4, rows, device=logits.device, dtype=torch.float32)
    _row_sums[(rows,)](logits, logits.stride(0), targets, sums, rows, width, scale, block=BLOCK, num_warps=8)
    return sums


def row_gradient(logits: Tensor, targets: Tensor, of_rows: RowTensors, scale: float, dtype: torch.dtype) -> Tensor:
    """[rows, V] gradient of the logits in `dtype`, which overwrites the logits in memory."""
    rows, width = logits.shape
    gradient = logits.view(dtype)
    arguments = (logits, logits.stride(0), gradient, targets, *of_rows, width, scale)
    _row_gradient[(rows,)](*arguments, block=BLOCK, num_warps=8)
    return gradient[:, :width]
