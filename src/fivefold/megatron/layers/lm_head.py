"""Heads of Megatron-Core's models: hidden states -> log-probs and entropies, or values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fivefold.backend.log_probs import log_probs
from fivefold.megatron.patches.gradients import taken_by_buffer


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
        buffer = None if into is None else (into, taken_by_buffer)
        return log_probs(hidden_SD, weight, targets_S, start, valid, 1.0 / temperature, self.tp_group, buffer)


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
