"""Root-mean-square norm: [..., D] -> [..., D]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(MegatronModule):
    """Root-mean-square norm whose weight is marked: Megatron-Core reduces its gradient over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # With fp32_residual_connection the sum over layers is in float32, and what follows a norm in the model's dtype.
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.weight.dtype)
