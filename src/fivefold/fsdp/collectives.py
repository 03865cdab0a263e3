"""Communication inside a forward pass, and what its gradients are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Pair(torch.autograd.Function):
    """A collective of the forward pass, and the one that its gradient takes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


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


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = x.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


def _all_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _summed_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    shard = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(shard, x.contiguous(), group=group)
    return shard


def _all_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = _all_rows(x[None], group)
    return torch.cat(list(parts), -1)


def _part_of_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


def _pair(there: Collective, back: Collective) -> Collective:
    """Return a collective with its gradient, which leaves a tensor as it is in a group of one rank."""

    def collective(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        result: Tensor = _Pair.apply(x, group, there, back) if group.size() > 1 else x
        return result

    return collective


copy_to = _pair(_same, _sum)
"""Returns the same tensor on every rank; ranks compute different parts from it, so its gradient is their sum."""
sum_over = _pair(_sum, _same)
"""Returns the sum of the ranks' tensors, from which all of them compute the same: each passes the gradient on as it is."""
gather_tokens = _pair(_all_rows, _summed_rows)
"""Returns the rows of all ranks, one rank after the other; each rank gets the summed gradient of its own rows."""
scatter_tokens = _pair(_summed_rows, _all_rows)
"""Returns this rank's rows of the sum of all ranks' tensors; every rank gets the gradient of all rows."""
gather_last = _pair(_all_last, _part_of_last)
"""Returns the ranks' parts of the last dimension, from which all of them compute the same: each keeps its gradient."""
split_last = _pair(_part_of_last, _all_last)
"""Returns this rank's part of the last dimension of a tensor that all ranks have; the gradient is whole on each rank."""


def own_rows(matrix: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return this rank's rows of a matrix that all ranks have, and the index of the first; the last rank may have fewer."""
    if group.size() == 1:
        return matrix, 0
    most = -(-len(matrix) // group.size())
    begin = min(group.rank() * most, len(matrix))
    rows: Tensor = _OwnRows.apply(matrix, begin, min(most, len(matrix) - begin), group)
    return rows, begin
