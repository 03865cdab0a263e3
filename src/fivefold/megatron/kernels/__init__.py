"""What a GPU does in one pass over memory where PyTorch takes several; each has a twin in plain PyTorch at its caller.

Nothing here is imported on a CPU: Triton comes with torch's builds for CUDA.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def serve(tensor: Tensor) -> bool:
    """Whether Triton's kernels can take this tensor."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
