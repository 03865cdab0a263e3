"""Megatron-Core's dense layers call their SwiGLU by name: on a GPU they find the kernel that takes one pass."""

from __future__ import annotations

from typing import Any

import megatron.core.transformer.mlp as mlp
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor

from fivefold.megatron import kernels


def install() -> None:
    """Put it there; what it does not take goes on to Megatron-Core's own."""
    module: Any = mlp
    module.bias_swiglu_impl = _swiglu


def _swiglu(product: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    if bias is None and not any(options) and kernels.serve(product):
        from fivefold.megatron.kernels.swiglu import swiglu

        return swiglu(product)
    found: Tensor = bias_swiglu_impl(product, bias, *options)
    return found
