"""What a GPU does in one pass over memory where PyTorch takes several; each has a twin in plain PyTorch at its caller.

Nothing here is imported on a CPU: Triton comes with torch's builds for CUDA.
"""

from __future__ import annotations

from torch import Tensor

from fivefold.config.packages import can_import


def serve(tensor: Tensor) -> bool:
    """Whether Triton's kernels can take this tensor."""
    return tensor.is_cuda and can_import("triton")
