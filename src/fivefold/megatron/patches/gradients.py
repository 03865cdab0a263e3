"""Replaces Apex in Megatron-Core where gradients are accumulated, measured and clipped, using only PyTorch.

Weight gradients are added to the optimizer's float32 buffer (`gradient_accumulation_fusion`), which cuBLAS supports as well.
Norms and clipping process all tensors at once and do not involve the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer.clip_grads as clip_grads
import megatron.core.tensor_parallel.layers as layers
import torch
from megatron.core.utils import local_multi_tensor_applier
from torch import Tensor

from fivefold.backend.log_probs import add_product


def taken_by_buffer(weight: Tensor) -> Tensor:
    """Return what autograd receives for a weight whose gradient is already in `main_grad`.

    Megatron-Core's hook expects a tensor. It ignores the content, unless the weight has another use whose gradient is added
    to this one (`zero_out_wgrad`: an embedding that is also the output layer).
    """
    parameter: Any = weight
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def install() -> None:
    """Install these functions where Apex and Transformer Engine are missing."""
    products: Any = layers
    if not products._grad_accum_fusion_available:
        products.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate
        )
        products._grad_accum_fusion_available = True
    clipping: Any = clip_grads
    if clipping.multi_tensor_applier is local_multi_tensor_applier:
        clipping.l2_norm_impl, clipping.multi_tensor_scale_impl = _norm, _scale
        # No gradient here is a DTensor, and checking each one takes milliseconds in which the GPU waits.
        clipping.to_local_if_dtensor = _as_it_is


def _accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    add_product(main_grad, grad_output, total_input)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _norm(chunk_size: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """[1] norm of all tensors together, on their device."""
    return torch.stack(torch._foreach_norm(lists[0])).norm()[None], None


def _scale(chunk_size: int, flag: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Multiply tensors by a number, in place."""
    sources, scaled = lists
    assert all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(sources, scaled, strict=True))
    torch._foreach_mul_(scaled, factor)
