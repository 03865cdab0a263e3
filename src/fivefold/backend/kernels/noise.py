"""Draws a token of each row of logits by its own random key, with its log-prob, in one pass over the logits."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of counters of a row that one program draws from; each gives four columns."""
PARTS = tl.constexpr(5)
"""Numbers that a program finds in its columns: largest logit, sum of exponentials, best score, its logit, its column."""


@triton.jit
def exponential(bits):
    """Noise with mean 1 from 32 random bits."""
    # The middles of 2^32 intervals: the noise is neither 0 nor infinite. Small noise decides which token is drawn, and its
    # logarithm would have too few digits.
    share = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = share * (1.0 + share * (0.5 + share * (0.33333334 + share * 0.25)))
    return tl.where(share < 0.015625, series, -tl.log(rest))


@triton.jit
def _score(begin, counter, start, quarter, width, bits):
    column = start + counter
    inside = (counter < quarter) & (column < width)
    logit = tl.load(begin + column, mask=inside, other=float("-inf"))
    return logit, logit - tl.log(exponential(bits)), column


@triton.jit
def _better(score, logit, column, other_score, other_logit, other_column):
    is_better = other_score > score
    logit = tl.where(is_better, other_logit, logit)
    return tl.maximum(score, other_score), logit, tl.where(is_better, other_column, column)


@triton.jit
def _score_columns(logits, keys, parts, stride, width, block: tl.constexpr):
    row, part, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    seed = tl.load(keys + row)
    offset = tl.load(keys + rows + row).to(tl.int32)
    quarter = tl.cdiv(width, 4)
    counter = part * block + tl.arange(0, block)
    zero = counter * 0
    bits_1, bits_2, bits_3, bits_4 = tl.philox(seed, counter, zero + offset, zero, zero)
    begin = logits + row.to(tl.int64) * stride
    logit_1, score_1, column_1 = _score(begin, counter, 0 * quarter, quarter, width, bits_1)
    logit_2, score_2, column_2 = _score(begin, counter, 1 * quarter, quarter, width, bits_2)
    logit_3, score_3, column_3 = _score(begin, counter, 2 * quarter, quarter, width, bits_3)
    logit_4, score_4, column_4 = _score(begin, counter, 3 * quarter, quarter, width, bits_4)
    largest = tl.max(tl.maximum(tl.maximum(logit_1, logit_2), tl.maximum(logit_3, logit_4)), 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.exp(logit_1 - shift) + tl.exp(logit_2 - shift) + tl.exp(logit_3 - shift) + tl.exp(logit_4 - shift)
    score, logit, column = _better(score_1, logit_1, column_1, score_2, logit_2, column_2)
    score, logit, column = _better(score, logit, column, score_3, logit_3, column_3)
    score, logit, column = _better(score, logit, column, score_4, logit_4, column_4)
    is_best = tl.arange(0, block) == tl.argmax(score, 0)
    count = tl.num_programs(1)
    place = parts + row * PARTS * count + part
    tl.store(place, largest)
    tl.store(place + count, tl.sum(total, 0))
    tl.store(place + 2 * count, tl.max(score, 0))
    tl.store(place + 3 * count, tl.sum(tl.where(is_best, logit, 0.0), 0))
    # Exact below 2^24 columns.
    tl.store(place + 4 * count, tl.sum(tl.where(is_best, column, 0), 0).to(tl.float32))


@triton.jit
def _choose(parts, drawn, count, padded: tl.constexpr):
    row, rows = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, padded)
    inside = lane < count
    begin = parts + row * PARTS * count + lane
    largest = tl.load(begin, mask=inside, other=float("-inf"))
    total = tl.load(begin + count, mask=inside, other=0.0)
    score = tl.load(begin + 2 * count, mask=inside, other=float("-inf"))
    is_best = lane == tl.argmax(score, 0)
    logit = tl.sum(tl.where(is_best, tl.load(begin + 3 * count, mask=inside, other=0.0), 0.0), 0)
    column = tl.sum(tl.where(is_best, tl.load(begin + 4 * count, mask=inside, other=0.0), 0.0), 0)
    top = tl.max(largest, 0)
    logprob = logit - top - tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(drawn + row, column.to(tl.int32))
    tl.store(drawn + rows + row, logprob.to(tl.int32, bitcast=True))


def draw_tokens(logits_RV: Tensor, seeds_R: np.ndarray, offsets_R: np.ndarray) -> Tensor:
    """Returns int32 [2, R]: the drawn token of each row, and the bits of its float32 log-prob.

    The token is that of the largest logit - log(noise), with exponential noise: the first arrival of Poisson processes whose
    rates are the probabilities. A logit of -inf is never drawn if another one is not. The noise depends on seed, offset and
    column alone: Philox4x32-10 (Salmon et al. 2011) with the seed as key and (column modulo a quarter of the row, offset, 0,
    0) as counter.
    """
    rows, width = logits_RV.shape
    assert logits_RV.dtype is torch.float32 and logits_RV.stride(-1) == 1 and width < 1 << 24
    keys = np.empty((2, rows), np.uint64)
    keys[0], keys[1] = seeds_R, offsets_R
    device = logits_RV.device
    on_device = torch.from_numpy(keys.view(np.int64)).to(device, non_blocking=True)
    count = triton.cdiv(triton.cdiv(width, 4), BLOCK)
    parts = torch.empty(rows, PARTS.value, count, dtype=torch.float32, device=device)
    drawn_2R = torch.empty(2, rows, dtype=torch.int32, device=device)
    _score_columns[(rows, count)](logits_RV, on_device, parts, logits_RV.stride(0), width, block=BLOCK, num_warps=4)
    _choose[(rows,)](parts, drawn_2R, count, padded=triton.next_power_of_2(count), num_warps=1)
    return drawn_2R
