"""Exponential noise from many random keys in one launch, with which a token is drawn from each row of probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of counters of a row that one program draws from; each gives four columns."""


@triton.jit
def _divide(values, keys, count, stride, width, block: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(keys + place)
    seed = tl.load(keys + count + place)
    offset = tl.load(keys + 2 * count + place).to(tl.int32)
    quarter = tl.cdiv(width, 4)
    counter = tl.program_id(1) * block + tl.arange(0, block)
    zero = counter * 0
    first, second, third, fourth = tl.philox(seed, counter, zero + offset, zero, zero)
    begin = values + row * stride
    _divide_quarter(begin, counter, 0 * quarter, quarter, width, first)
    _divide_quarter(begin, counter, 1 * quarter, quarter, width, second)
    _divide_quarter(begin, counter, 2 * quarter, quarter, width, third)
    _divide_quarter(begin, counter, 3 * quarter, quarter, width, fourth)


@triton.jit
def _divide_quarter(begin, counter, start, quarter, width, bits):
    column = start + counter
    inside = (counter < quarter) & (column < width)
    # The middles of 2^32 intervals: the noise is neither 0 nor infinite. Small noise decides which token is drawn, and its
    # logarithm would have too few digits.
    share = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = share * (1.0 + share * (0.5 + share * (0.33333334 + share * 0.25)))
    noise = tl.where(share < 0.015625, series, -tl.log(rest))
    value = tl.load(begin + column, mask=inside, other=0.0)
    tl.store(begin + column, value / noise, mask=inside)


def divide_by_noise(
    values_RV: Tensor, rows: Sequence[int], seeds: Sequence[int] | np.ndarray, offsets: Sequence[int] | np.ndarray
) -> None:
    """Divide these rows of float32 numbers in place by exponential noise with mean 1, each row by that of its own key.

    The largest quotient of a row of probabilities is at a token drawn from them: the first arrival of Poisson processes with
    these rates. The noise depends on seed, offset and column alone: Philox4x32-10 (Salmon et al. 2011) with the seed as key
    and (column modulo a quarter of the row, offset, 0, 0) as counter.
    """
    assert values_RV.dtype is torch.float32 and values_RV.stride(-1) == 1
    keys = np.empty((3, len(rows)), np.uint64)
    keys[0], keys[1], keys[2] = rows, seeds, offsets
    on_device = torch.from_numpy(keys.view(np.int64)).to(values_RV.device, non_blocking=True)
    width = values_RV.shape[-1]
    grid = (len(rows), triton.cdiv(triton.cdiv(width, 4), BLOCK))
    _divide[grid](values_RV, on_device, len(rows), values_RV.stride(0), width, block=BLOCK, num_warps=4)
