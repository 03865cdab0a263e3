"""Communication inside a forward pass, and what its gradients are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Copy(torch.autograd.Function):
    """The same tensor on every rank; ranks compute different parts from it, so its gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors, from which all of them compute the same: each passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    """The rows of all ranks, one rank after the other; each rank gets the summed gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_rows(x_T, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(shard, grad.contiguous(), group=ctx.group)
        return shard, None


class _ScatterTokens(torch.autograd.Function):
    """This rank's rows of the sum of all ranks' tensors; every rank gets the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        summed_T = x_T.new_empty(len(x_T) // group.size(), *x_T.shape[1:])
        dist.reduce_scatter_tensor(summed_T, x_T.contiguous(), group=group)
        return summed_T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grad, ctx.group), None


class _GatherLast(torch.autograd.Function):
    """The ranks' parts of the last dimension, from which all of them compute the same: each keeps its part's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_last(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()].contiguous(), None


class _SplitLast(torch.autograd.Function):
    """This rank's part of the last dimension of a tensor that all ranks have; the gradient is whole on each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size(), -1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_last(grad, ctx.group), None


class _OwnRows(torch.autograd.Function):
    """This rank's rows of a matrix that all ranks have; the gradient is that of all rows on each of them."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, begin: int, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.total = group, len(matrix)
        return matrix[begin : begin + rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        most = -(-ctx.total // ctx.group.size())
        padded = grad.new_zeros(most, *grad.shape[1:])
        padded[: len(grad)] = grad
        return _all_rows(padded, ctx.group)[: ctx.total], None, None, None


def _all_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _all_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = _all_rows(x[None], group)
    return torch.cat(list(parts), -1)


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    copied: Tensor = _Copy.apply(x, group) if group.size() > 1 else x
    return copied


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed: Tensor = _Sum.apply(x, group) if group.size() > 1 else x
    return summed


def gather_tokens(x_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered: Tensor = _GatherTokens.apply(x_T, group) if group.size() > 1 else x_T
    return gathered


def scatter_tokens(x_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows_T: Tensor = _ScatterTokens.apply(x_T, group) if group.size() > 1 else x_T
    return rows_T


def gather_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered: Tensor = _GatherLast.apply(x, group)
    return gathered


def split_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    part: Tensor = _SplitLast.apply(x, group)
    return part


def own_rows(matrix: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return this rank's rows of a matrix that all ranks have, and the index of the first; the last rank may have fewer."""
    if group.size() == 1:
        return matrix, 0
    most = -(-len(matrix) // group.size())
    begin = min(group.rank() * most, len(matrix))
    rows: Tensor = _OwnRows.apply(matrix, begin, min(most, len(matrix) - begin), group)
    return rows, begin
