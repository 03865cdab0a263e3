"""Recomputation of a layer for its gradients, without the output that only the next layer would read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fivefold.backend.log_probs import add_product
from fivefold.megatron.patches.gradients import taken_by_buffer


class LastLinear(RowParallelLinear):
    """The linear layer whose output is added to the residual and used nowhere else.

    The derivatives of that sum do not need its value. If whole layers are recomputed one by one, neither the product nor the
    collective after it is repeated.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not (_recomputes_single_layers(self.config) and is_checkpointing() and torch.is_grad_enabled()):
            result: tuple[Tensor, Tensor | None] = super().forward(input_)
            return result
        into = getattr(self.weight, "main_grad", None) if self.gradient_accumulation_fusion else None
        unread: Tensor = _UnreadProduct.apply(input_, self.weight, into)
        if self.sequence_parallel:
            unread = _UnreadScatter.apply(unread, self.tp_group)
        if self.skip_bias_add or self.bias is None:
            return unread, self.bias
        return unread + self.bias, None


def _recomputes_single_layers(config: TransformerConfig) -> bool:
    single = config.recompute_method == "block" or config.recompute_num_layers == 1
    return bool(config.recompute_granularity == "full" and single)


class _UnreadProduct(torch.autograd.Function):
    """Backward of input · weightᵀ; forward returns a tensor of its shape, with undefined content."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, into: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.into = into
        return input.new_empty(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_input, of_weight = grad @ weight, None
        if ctx.needs_input_grad[1]:
            rows, inputs = grad.flatten(0, -2), input.flatten(0, -2)
            if ctx.into is None:
                of_weight = rows.t() @ inputs
            else:
                add_product(ctx.into, rows, inputs)
                of_weight = taken_by_buffer(weight)
        return grad_input, of_weight, None


class _UnreadScatter(torch.autograd.Function):
    """Backward of a reduce-scatter along the sequence; forward returns a tensor of its shape, with undefined content."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return full.new_empty(full.shape[0] // group.size(), *full.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_along_first_dim(grad, ctx.group), None
