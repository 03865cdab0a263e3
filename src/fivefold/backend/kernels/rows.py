"""Sum of up to K rows of a tensor for each row of the result, in one pass: each row is read once, and added in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Number of elements of a row that are read at once."""


@triton.jit
def _sum_rows(rows, places, output, width, most: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for number in range(most):
        place = tl.load(places + row * most + number).to(tl.int64)
        # Nothing is read where the place is -1.
        read = tl.where(place >= 0, width, 0)
        total += tl.load(rows + place * width + column, mask=column < read, other=0.0).to(tl.float32)
    tl.store(output + row * width + column, total.to(output.dtype.element_ty), mask=column < width)


def sum_rows(rows_MD: Tensor, places_NK: Tensor) -> Tensor:
    """Return [N, D]: the sum of the rows at `places_NK`, which leaves out places below 0."""
    rows_MD, places_NK = rows_MD.contiguous(), places_NK.contiguous()
    (count, most), width = places_NK.shape, rows_MD.shape[1]
    output = rows_MD.new_empty(count, width)
    if count and width:
        block = min(BLOCK, triton.next_power_of_2(width))
        grid = (count, triton.cdiv(width, block))
        _sum_rows[grid](rows_MD, places_NK, output, width, most=most, block=block, num_warps=4)
    return output
