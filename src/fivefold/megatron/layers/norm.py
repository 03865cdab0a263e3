"""Norms over the hidden dimension: [..., D] -> [..., D]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Norm(MegatronModule):
    """A norm whose parameters are marked: Megatron-Core reduces their gradients over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.weight = self._parameter(torch.ones(hidden_size))

    def _parameter(self, values: Tensor) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(values.to(self.config.params_dtype))
        parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return parameter


class RMSNorm(Norm):
    """Root-mean-square norm."""

    def forward(self, x: Tensor) -> Tensor:
        if self.config.layernorm_zero_centered_gamma:
            # As in Gemma: 1 + weight would be rounded in 16 bits.
            normed = F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps)
        else:
            normed = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # With fp32_residual_connection the embedding is in float32, and what follows a norm in the model's dtype.
        return normed.to(self.weight.dtype)


class LayerNorm(Norm):
    """Layer norm with a bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = self._parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        # As in Nemotron: 1 + weight is rounded in 16 bits.
        weight = 1 + self.weight if self.config.layernorm_zero_centered_gamma else self.weight
        normed = F.layer_norm(x, self.weight.shape, weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
        return normed.to(self.weight.dtype)


NORMS: dict[str, type[Norm]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""Class of each `TransformerConfig.normalization`."""
