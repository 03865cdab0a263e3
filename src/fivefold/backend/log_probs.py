"""Hidden states -> log-probs and entropies over a vocabulary that may be sharded, without a [tokens, vocabulary] tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.backend import kernels

CHUNK_ELEMENTS = 1 << 26
"""Maximum number of logits at once on a rank: 256 MiB in float32, of which plain PyTorch needs several copies."""
KERNEL_CHUNK_ELEMENTS = 1 << 29
"""Maximum number of logits at once if a kernel turns them into their gradient: 2 GiB in float32.

It is large because each chunk adds to the weight's gradient.
"""
Buffer: TypeAlias = tuple[Tensor, Callable[[Tensor], Tensor]]
"""A buffer that the weight's gradient is added to, and what autograd receives for the weight instead."""


def log_probs(
    hidden_SD: Tensor,
    weight_VD: Tensor,
    targets_S: Tensor,
    start: int,
    valid: int,
    inverse_temperature: float,
    group: dist.ProcessGroup | None = None,
    buffer: Buffer | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """[S] log-prob of `targets_S` and [S] entropy.

    `weight_VD` are the rows of the vocabulary from `start` on, of which the first `valid` count; `group` are the ranks that
    hold the others. With a `cap`, logits are bounded to cap · tanh(logit / cap) before the temperature.
    """
    head = _Head(start, valid, inverse_temperature, group, buffer, cap)
    logprobs_S, entropy_S = _LogProbs.apply(hidden_SD, weight_VD, targets_S, head)
    return logprobs_S, entropy_S


def add_product(buffer: Tensor, grad_SV: Tensor, input_SD: Tensor) -> None:
    """Compute buffer [V, D] += gradᵀ · input, summed in the buffer's own precision."""
    if grad_SV.is_cuda and buffer.dtype == torch.float32 and grad_SV.dtype != torch.float32:
        torch.addmm(buffer, grad_SV.t(), input_SD, out_dtype=torch.float32, out=buffer)
    elif buffer.dtype == grad_SV.dtype:
        buffer.addmm_(grad_SV.t(), input_SD)
    else:
        buffer += grad_SV.t() @ input_SD


def _logits(hidden: Tensor, weight: Tensor, cap: float | None) -> Tensor:
    """Return float32 logits of one chunk of tokens."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        # The product of 16-bit numbers is kept in float32 instead of rounded.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).float()
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _row_sums(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Compute `kernels.logits.row_sums` in plain PyTorch; overwrites the logits."""
    if scale != 1.0:
        logits.mul_(scale)
    is_inside = (targets >= 0) & (targets < logits.shape[1])
    picked = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    largest = logits.amax(1)
    weights = (logits - largest[:, None]).exp_()
    total = weights.sum(1)
    return torch.stack([largest, total, weights.mul_(logits).sum(1), torch.where(is_inside, picked, 0.0)])


def _row_gradient(
    logits: Tensor, targets: Tensor, of_rows: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, dtype: torch.dtype
) -> Tensor:
    """Compute `kernels.logits.row_gradient` in plain PyTorch; overwrites the logits."""
    log_sum, entropy, of_logprob, of_entropy = of_rows
    if scale != 1.0:
        logits.mul_(scale)
    log_p = logits.sub_(log_sum[:, None])
    p = log_p.exp()
    # d logprob / d logit = [target] - p;  d entropy / d logit = -p (log p + entropy)
    grad = p * -of_logprob[:, None]
    grad -= of_entropy[:, None] * p * (log_p + entropy[:, None])
    is_inside = (targets >= 0) & (targets < logits.shape[1])
    target = targets.clamp(0, logits.shape[1] - 1)[:, None]
    grad.scatter_add_(1, target, torch.where(is_inside, of_logprob, 0.0)[:, None])
    return grad.mul_(scale).to(dtype)


@dataclass(frozen=True)
class _Head:
    """Arguments of `log_probs` that are not tensors, by the names there."""

    start: int
    valid: int
    inverse_temperature: float
    group: dist.ProcessGroup | None
    buffer: Buffer | None
    cap: float | None


class _LogProbs(torch.autograd.Function):
    """Log-prob of a target and entropy over a vocabulary sharded by rank; backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        targets_S: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        tokens, valid, group, cap = hidden_SD.shape[0], head.valid, head.group, head.cap
        # Rows: largest logit; sum of exp, sum of exp * logit, the target's logit.
        statistics = hidden_SD.new_zeros((4, tokens), dtype=torch.float32)
        statistics[0] = -torch.inf
        rows = max(1, (_chunk_elements(hidden_SD) if cap is None else CHUNK_ELEMENTS) // max(valid, 1))
        weight = weight_VD[:valid].detach()
        local_S = targets_S - head.start
        row_sums, _ = _passes(hidden_SD)
        if valid:
            for begin in range(0, tokens, rows):
                chunk = slice(begin, begin + rows)
                # Without a name, so that they are freed before the next chunk's are there.
                statistics[:, chunk] = row_sums(
                    _logits(hidden_SD[chunk], weight, cap), local_S[chunk], head.inverse_temperature
                )
        largest_S, sums = statistics[0], statistics[1:]
        if group is not None and group.size() > 1:
            local_largest_S = largest_S.clone()
            dist.all_reduce(largest_S, dist.ReduceOp.MAX, group=group)
            sums[:2] *= (local_largest_S - largest_S).exp()
            dist.all_reduce(sums, group=group)
        log_sum_S = largest_S + sums[0].log()
        entropy_S = log_sum_S - sums[1] / sums[0]
        ctx.save_for_backward(hidden_SD, weight_VD, local_S, log_sum_S, entropy_S)
        ctx.head, ctx.rows = head, rows
        ctx.set_materialize_grads(False)
        return sums[2] - log_sum_S, entropy_S

    @staticmethod
    def backward(ctx: Any, grad_logprob_S: Tensor | None, grad_entropy_S: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, local_S, log_sum_S, entropy_S = ctx.saved_tensors
        of_logprob_S, of_entropy_S = (
            (torch.zeros_like(log_sum_S) if grad is None else grad.contiguous()) for grad in (grad_logprob_S, grad_entropy_S)
        )
        head, rows = ctx.head, ctx.rows
        valid, buffer, cap = head.valid, head.buffer, head.cap
        weight = weight_VD[:valid]
        grad_hidden = torch.zeros_like(hidden_SD)
        tokens = hidden_SD.shape[0]
        _, row_gradient = _passes(hidden_SD)
        # Several chunks are summed in float32; a single chunk needs no second buffer.
        dtype = weight_VD.dtype if tokens <= rows else torch.float32
        trains = ctx.needs_input_grad[1]
        grad_weight = None if buffer is None else buffer[0]
        if grad_weight is None and trains:
            grad_weight = torch.zeros_like(weight_VD, dtype=dtype)
        for begin in range(0, tokens if valid else 0, rows):
            chunk = slice(begin, begin + rows)
            hidden = hidden_SD[chunk]
            logits = _logits(hidden, weight, cap)
            # d cap · tanh(x / cap) / dx; the next function overwrites the logits.
            slope = None if cap is None else 1 - (logits / cap).square()
            of_rows = tuple(rows_S[chunk] for rows_S in (log_sum_S, entropy_S, of_logprob_S, of_entropy_S))
            grad = row_gradient(logits, local_S[chunk], of_rows, head.inverse_temperature, hidden.dtype)
            if slope is not None:
                grad *= slope
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight[:valid], grad, hidden)
            # The next chunk's logits reuse its memory.
            del grad, logits, slope
        returned = None
        if trains and grad_weight is not None:
            returned = grad_weight.to(weight_VD.dtype) if buffer is None else buffer[1](weight_VD)
        return grad_hidden, returned, None, None


def _chunk_elements(tensor: Tensor) -> int:
    return KERNEL_CHUNK_ELEMENTS if kernels.serve(tensor) else CHUNK_ELEMENTS


def _passes(tensor: Tensor) -> tuple[Any, Any]:
    """Return the functions that process a chunk's logits, forward and backward: kernels or plain PyTorch."""
    if not kernels.serve(tensor):
        return _row_sums, _row_gradient
    from fivefold.backend.kernels.logits import row_gradient, row_sums

    return row_sums, row_gradient
