"""Kernels that take one pass over memory where PyTorch takes several; each caller has an equivalent in plain PyTorch.

Nothing here is imported on a CPU: Triton comes with torch's builds for CUDA.
"""

from __future__ import annotations

from torch import Tensor

from fivefold.config.packages import can_import


def serve(tensor: Tensor) -> bool:
    """Whether the Triton kernels support this tensor."""
    return tensor.is_cuda and can_import("triton")
