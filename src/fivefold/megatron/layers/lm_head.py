"""Heads of a model: hidden states -> log-probs and entropies, without a [tokens, vocabulary] tensor; or values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fivefold.megatron import kernels
from fivefold.megatron.patches.gradients import add_product, taken_by_buffer

CHUNK_ELEMENTS = 1 << 26
"""Maximum number of logits at once on a rank: 256 MiB in float32, of which plain PyTorch needs several copies."""
KERNEL_CHUNK_ELEMENTS = 1 << 29
"""Maximum number of logits at once if a kernel turns them into their gradient: 2 GiB in float32.

It is large because each chunk adds to the weight's gradient.
"""


class LogProbHead(ColumnParallelLinear):
    """The output layer, which computes log-probs and entropies for the tokens to be predicted."""

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        source_index_S: Tensor,
        targets_S: Tensor,
        valid_vocab: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """[S] log-prob of `targets_S` and [S] entropy, from the hidden states at `source_index_S`.

        `valid_vocab` is the vocabulary size without padding: padded entries are excluded everywhere.
        """
        weight = self.weight if weight is None else weight
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        hidden_SD = hidden.squeeze(1)[source_index_S]
        start = self.tp_group.rank() * weight.shape[0]
        valid = max(0, min(valid_vocab - start, weight.shape[0]))
        # The gradient goes directly into the optimizer's buffer if Megatron-Core's own products do the same.
        into = getattr(weight, "main_grad", None) if self.config.gradient_accumulation_fusion else None
        logprobs_S, entropy_S = _LogProbs.apply(
            hidden_SD, weight, targets_S, start, valid, 1.0 / temperature, self.tp_group, into
        )
        return logprobs_S, entropy_S


class ValueHead(torch.nn.Module):
    """One number per token: the product of its hidden state and a weight that every tensor-parallel rank holds whole."""

    def __init__(self, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self._sequence_parallel, self._tp = config.sequence_parallel, tp
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, at_S: Tensor) -> Tensor:
        """[S] values from the hidden states at `at_S`, in float32."""
        if self._sequence_parallel:
            # Every rank computes the same values from all tokens, so each passes back the gradient of its own tokens.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._tp)
        return hidden.squeeze(1)[at_S].float() @ self.weight[0].float()


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return float32 logits of one chunk of tokens."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        # The product of 16-bit numbers is kept in float32 instead of rounded.
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden, weight.t()).float()


def _row_sums(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Compute `kernels.logits.row_sums` in plain PyTorch; overwrites the logits."""
    if scale != 1.0:
        logits.mul_(scale)
    here = (targets >= 0) & (targets < logits.shape[1])
    picked = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    largest = logits.amax(1)
    weights = (logits - largest[:, None]).exp_()
    total = weights.sum(1)
    return torch.stack([largest, total, weights.mul_(logits).sum(1), torch.where(here, picked, 0.0)])


def _row_gradient(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `kernels.logits.row_gradient` in plain PyTorch; overwrites the logits."""
    if scale != 1.0:
        logits.mul_(scale)
    log_p = logits.sub_(log_sum[:, None])
    p = log_p.exp()
    # d logprob / d logit = [target] - p;  d entropy / d logit = -p (log p + entropy)
    grad = p * -of_logprob[:, None]
    grad -= of_entropy[:, None] * p * (log_p + entropy[:, None])
    here = (targets >= 0) & (targets < logits.shape[1])
    target = targets.clamp(0, logits.shape[1] - 1)[:, None]
    grad.scatter_add_(1, target, torch.where(here, of_logprob, 0.0)[:, None])
    return grad.mul_(scale).to(dtype)


class _LogProbs(torch.autograd.Function):
    """Log-prob of a target and entropy over a vocabulary sharded by rank; backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        targets_S: Tensor,
        start: int,
        valid: int,
        inverse_temperature: float,
        group: dist.ProcessGroup,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden_SD.shape[0]
        # Rows: largest logit; sum of exp, sum of exp * logit, the target's logit.
        found = hidden_SD.new_zeros((4, tokens), dtype=torch.float32)
        found[0] = -torch.inf
        rows = max(1, _chunk_elements(hidden_SD) // max(valid, 1))
        weight = weight_VD[:valid].detach()
        local_S = targets_S - start
        row_sums, _ = _passes(hidden_SD)
        if valid:
            for begin in range(0, tokens, rows):
                chunk = slice(begin, begin + rows)
                found[:, chunk] = row_sums(_logits(hidden_SD[chunk], weight), local_S[chunk], inverse_temperature)
        largest_S, sums = found[0], found[1:]
        if group.size() > 1:
            own_S = largest_S.clone()
            dist.all_reduce(largest_S, dist.ReduceOp.MAX, group=group)
            sums[:2] *= (own_S - largest_S).exp()
            dist.all_reduce(sums, group=group)
        log_sum_S = largest_S + sums[0].log()
        entropy_S = log_sum_S - sums[1] / sums[0]
        ctx.save_for_backward(hidden_SD, weight_VD, local_S, log_sum_S, entropy_S)
        ctx.valid, ctx.rows, ctx.inverse_temperature, ctx.into = valid, rows, inverse_temperature, into
        ctx.set_materialize_grads(False)
        return sums[2] - log_sum_S, entropy_S

    @staticmethod
    def backward(ctx: Any, grad_logprob_S: Tensor | None, grad_entropy_S: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, local_S, log_sum_S, entropy_S = ctx.saved_tensors
        of_logprob_S, of_entropy_S = (
            (torch.zeros_like(log_sum_S) if grad is None else grad.contiguous()) for grad in (grad_logprob_S, grad_entropy_S)
        )
        valid, rows, into = ctx.valid, ctx.rows, ctx.into
        weight = weight_VD[:valid]
        grad_hidden = torch.zeros_like(hidden_SD)
        tokens = hidden_SD.shape[0]
        _, row_gradient = _passes(hidden_SD)
        # Several chunks are summed in float32; a single chunk needs no second buffer.
        dtype = weight_VD.dtype if tokens <= rows else torch.float32
        trains = ctx.needs_input_grad[1]
        grad_weight = into if into is not None or not trains else torch.zeros_like(weight_VD, dtype=dtype)
        for begin in range(0, tokens if valid else 0, rows):
            chunk = slice(begin, begin + rows)
            hidden = hidden_SD[chunk]
            grad = row_gradient(
                _logits(hidden, weight),
                local_S[chunk],
                log_sum_S[chunk],
                entropy_S[chunk],
                of_logprob_S[chunk],
                of_entropy_S[chunk],
                ctx.inverse_temperature,
                hidden.dtype,
            )
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight[:valid], grad, hidden)
            # The next chunk's logits reuse its memory.
            del grad
        given = None
        if trains:
            given = grad_weight.to(weight_VD.dtype) if into is None else taken_by_buffer(weight_VD)
        return grad_hidden, given, None, None, None, None, None, None


def _chunk_elements(tensor: Tensor) -> int:
    return KERNEL_CHUNK_ELEMENTS if kernels.serve(tensor) else CHUNK_ELEMENTS


def _passes(tensor: Tensor) -> tuple[Any, Any]:
    """Return the functions that process a chunk's logits, forward and backward: kernels or plain PyTorch."""
    if not kernels.serve(tensor):
        return _row_sums, _row_gradient
    from fivefold.megatron.kernels.logits import row_gradient, row_sums

    return row_sums, row_gradient
