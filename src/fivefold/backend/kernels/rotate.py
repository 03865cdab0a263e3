"""Rotates queries or keys [T, H, D] by halves, in one pass each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of elements that a program works on."""


@triton.jit
def _rotate(states, cosines, sines, output, count, heads, width: tl.constexpr, sign: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    column = place % width
    half: tl.constexpr = width // 2
    is_first = column < half
    partner = tl.where(is_first, place + half, place - half)
    angle = place // (width * heads) * width + column
    # Backward is the rotation the other way, where each element takes the sine of its partner's.
    angle_of_sine = angle if sign > 0 else tl.where(is_first, angle + half, angle - half)
    x = tl.load(states + place, mask=inside, other=0.0).to(tl.float32)
    across = tl.load(states + partner, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sines + angle_of_sine, mask=inside, other=0.0).to(tl.float32)
    turned = tl.where(is_first, -across, across) * (sign * sin)
    tl.store(output + place, (x * cos + turned).to(output.dtype.element_ty), mask=inside)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_THD: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
        cosines_TD, sines_TD = cosines_TD.contiguous(), sines_TD.contiguous()
        ctx.save_for_backward(cosines_TD, sines_TD)
        return _rotated(states_THD, cosines_TD, sines_TD, 1)

    @staticmethod
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor, None, None]:
        cosines_TD, sines_TD = ctx.saved_tensors
        return _rotated(of_output, cosines_TD, sines_TD, -1), None, None


def _rotated(states_THD: Tensor, cosines_TD: Tensor, sines_TD: Tensor, sign: int) -> Tensor:
    states_THD = states_THD.contiguous()
    output, (_, heads, width) = torch.empty_like(states_THD), states_THD.shape
    if count := states_THD.numel():
        grid = (triton.cdiv(count, BLOCK),)
        _rotate[grid](states_THD, cosines_TD, sines_TD, output, count, heads, width, sign, block=BLOCK, num_warps=4)
    return output


def rotate(states_THD: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
    """Rotate the halves of each head: x · cos + (-x₂, x₁) · sin (RoFormer, 2104.09864, eq. 34, as Llama orders it)."""
    rotated: Tensor = _Rotate.apply(states_THD, cosines_TD, sines_TD)
    return rotated
