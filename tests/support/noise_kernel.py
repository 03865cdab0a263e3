"""A kernel that shows the noise of draws; it needs Triton."""

import triton
import triton.language as tl

from fivefold.backend.kernels.noise import exponential


@triton.jit
def store_noise(bits, noise, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(noise + place, exponential(tl.load(bits + place).to(tl.uint32, bitcast=True)))
