"""Replaces the SwiGLU that Megatron-Core's dense layers call: on a GPU, a kernel computes it in one pass."""

from __future__ import annotations

from typing import Any

import megatron.core.transformer.mlp as mlp
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor

from fivefold.backend import kernels


def install() -> None:
    """Install the replacement; calls that it does not support reach Megatron-Core's own function."""
    module: Any = mlp
    module.bias_swiglu_impl = _swiglu


def _swiglu(product: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    if bias is None and not any(options) and kernels.serve(product):
        from fivefold.backend.kernels.swiglu import swiglu

        return swiglu(product)
    output: Tensor = bias_swiglu_impl(product, bias, *options)
    return output
