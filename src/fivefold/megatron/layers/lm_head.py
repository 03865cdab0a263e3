"""What a model ends in: hidden states -> log-probs and entropies, without a [tokens, vocabulary] tensor; or values."""

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

CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at once on a rank: 256 MiB in float32."""


class LogProbHead(ColumnParallelLinear):
    """The output layer as a function of the tokens that are to be predicted."""

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        source_index_S: Tensor,
        targets_S: Tensor,
        valid_vocab: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """[S] log-prob of `targets_S` and [S] entropy, from the hidden states at `before_S`.

        `valid_vocab` is the vocabulary without padding: padded entries take no part in anything.
        """
        weight = self.weight if weight is None else weight
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        hidden_SD = hidden.squeeze(1)[source_index_S]
        start = self.tp_group.rank() * weight.shape[0]
        valid = max(0, min(valid_vocab - start, weight.shape[0]))
        logprobs_S, entropy_S = _LogProbs.apply(hidden_SD, weight, targets_S, start, valid, 1.0 / temperature, self.tp_group)
        return logprobs_S, entropy_S


class ValueHead(torch.nn.Module):
    """One number a token: the product of its hidden state with a weight that every tensor-parallel rank has whole."""

    def __init__(self, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self._sequence_parallel, self._tp = config.sequence_parallel, tp
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, at_S: Tensor) -> Tensor:
        """[S] values from the hidden states at `at_S`, in float32."""
        if self._sequence_parallel:
            # Every rank computes the same from all tokens, so each takes back the gradient of its own.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._tp)
        return hidden.squeeze(1)[at_S].float() @ self.weight[0].float()


def _logits(hidden: Tensor, weight: Tensor, inverse_temperature: float) -> Tensor:
    """float32 logits of one chunk of tokens."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        # The product of bfloat16 numbers, kept in float32 instead of rounded.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).float()
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


class _LogProbs(torch.autograd.Function):
    """Log-prob of a target and entropy over a vocabulary sharded by rank; logits are made again in backward."""

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
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden_SD.shape[0]
        # Row by row: largest logit; then sum of exp, sum of exp * logit, the target's logit.
        largest_S = hidden_SD.new_full((tokens,), -torch.inf, dtype=torch.float32)
        sums = hidden_SD.new_zeros((3, tokens), dtype=torch.float32)
        rows = max(1, CHUNK_ELEMENTS // max(valid, 1))
        weight = weight_VD[:valid].detach()
        local_S = targets_S - start
        here_S = (local_S >= 0) & (local_S < valid)
        if valid:
            for begin in range(0, tokens, rows):
                chunk = slice(begin, begin + rows)
                logits = _logits(hidden_SD[chunk], weight, inverse_temperature)
                picked = logits.gather(1, local_S[chunk].clamp(0, valid - 1)[:, None])[:, 0]
                sums[2, chunk] = torch.where(here_S[chunk], picked, 0.0)
                largest = logits.amax(1)
                weights = (logits - largest[:, None]).exp_()
                largest_S[chunk] = largest
                sums[0, chunk] = weights.sum(1)
                sums[1, chunk] = weights.mul_(logits).sum(1)
        if group.size() > 1:
            own_S = largest_S.clone()
            dist.all_reduce(largest_S, dist.ReduceOp.MAX, group=group)
            sums[:2] *= (own_S - largest_S).exp()
            dist.all_reduce(sums, group=group)
        log_sum_S = largest_S + sums[0].log()
        entropy_S = log_sum_S - sums[1] / sums[0]
        ctx.save_for_backward(hidden_SD, weight_VD, local_S, here_S, log_sum_S, entropy_S)
        ctx.valid, ctx.rows, ctx.inverse_temperature = valid, rows, inverse_temperature
        ctx.set_materialize_grads(False)
        return sums[2] - log_sum_S, entropy_S

    @staticmethod
    def backward(ctx: Any, grad_logprob_S: Tensor | None, grad_entropy_S: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, local_S, here_S, log_sum_S, entropy_S = ctx.saved_tensors
        if grad_logprob_S is None:
            grad_logprob_S = torch.zeros_like(log_sum_S)
        valid, rows = ctx.valid, ctx.rows
        weight = weight_VD[:valid]
        grad_hidden = torch.zeros_like(hidden_SD)
        tokens = hidden_SD.shape[0]
        one_chunk = tokens <= rows
        # Several chunks are summed in float32; one needs no second buffer.
        grad_weight = torch.zeros_like(weight_VD, dtype=weight_VD.dtype if one_chunk else torch.float32)
        for begin in range(0, tokens if valid else 0, rows):
            chunk = slice(begin, begin + rows)
            hidden = hidden_SD[chunk]
            log_p = _logits(hidden, weight, ctx.inverse_temperature).sub_(log_sum_S[chunk, None])
            p = log_p.exp()
            # d logprob / d logit = [target] - p;  d entropy / d logit = -p (log p + entropy)
            grad = p * -grad_logprob_S[chunk, None]
            if grad_entropy_S is not None:
                grad -= grad_entropy_S[chunk, None] * p * (log_p + entropy_S[chunk, None])
            target = local_S[chunk].clamp(0, valid - 1)[:, None]
            grad.scatter_add_(1, target, torch.where(here_S[chunk], grad_logprob_S[chunk], 0.0)[:, None])
            grad = grad.mul_(ctx.inverse_temperature).to(hidden.dtype)
            grad_hidden[chunk] = grad @ weight
            grad_weight[:valid] += grad.t() @ hidden
        return grad_hidden, grad_weight.to(weight_VD.dtype), None, None, None, None, None
