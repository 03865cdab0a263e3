"""Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2): Megatron-Core's layers, over our packed sequences.

Layer d (from 0) joins the hidden state at position i of the previous layer with the embedding of token i+1+d, and predicts
token i+2+d. Embedding and output layer are the model's own. These tokens are selected when a micro-batch is made: ranks need
not exchange them, and nothing crosses the end of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from fivefold.megatron.layers.norm import RMSNorm


def mtp_spec(layers: int, layer: ModuleSpec, detach: bool) -> MultiTokenPredictionBlockSubmodules:
    """Return specs of `layers` layers of multi-token prediction; with `detach`, their inputs receive no gradient."""
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=RMSNorm, hnorm=RMSNorm, eh_proj=ColumnParallelLinear, transformer_layer=layer, layer_norm=RMSNorm
    )
    kind = DetachedPredictionLayer if detach else PredictionLayer
    return MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(module=kind, submodules=submodules)] * layers)


class PredictionLayer(MultiTokenPredictionLayer):
    """Megatron-Core's layer, which reads the tokens ahead from the packing."""

    def _get_embeddings(
        self, input_ids: Tensor, position_ids: Tensor, embedding: Any, hidden_states: Tensor, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids_T = packed_seq_params.ahead[self.layer_number - 1].token_ids_T
        return input_ids, position_ids, embedding(input_ids=ids_T[None], position_ids=position_ids), hidden_states

    def _checkpointed_forward(
        self, forward_func: Callable[..., Tensor], *, hidden_states: Tensor, decoder_input: Tensor, **rest: Any
    ) -> Tensor:
        """Recompute with tensors only: Megatron-Core would pass the packing to a function that takes only tensors."""
        if self.config.recompute_method == "block":
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **rest)

        def compute(hidden: Tensor, embedded: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden, decoder_input=embedded, **rest)

        result: Tensor = tensor_parallel.checkpoint(compute, False, hidden_states, decoder_input)
        return result


class DetachedPredictionLayer(PredictionLayer):
    """A prediction layer whose loss passes no gradient to its input hidden states and embeddings."""

    def _get_embeddings(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, positions, embedded, hidden = super()._get_embeddings(*args, **kwargs)
        # Layers that are recomputed in backward pass gradients to their parameters only if their input requires one.
        stopped: Tensor = _StopGradient.apply(embedded)
        return ids, positions, stopped, hidden.detach().requires_grad_()


class _StopGradient(torch.autograd.Function):
    """Passes back a gradient of 0 instead of none: overlapped gradient reduction waits for every parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)
