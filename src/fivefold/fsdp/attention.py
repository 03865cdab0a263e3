"""The attention function that transformers' layers call: packed sequences, windows, context parallelism, sinks, soft cap."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from fivefold.backend.attention import attend
from fivefold.fsdp.collectives import gather_tokens
from fivefold.fsdp.current import current

NAME = "fivefold_packed"
"""Name of the function in transformers; transformers makes no mask for it."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention of [1, H, T, D] queries; returns [1, T, H, D]."""
    assert dropout == 0.0, "attention dropout would make log-probs random"
    now = current()
    assert now is not None, "our attention was called without a packed micro-batch"
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if now.mesh.cp.size() > 1:
        together = gather_tokens(torch.cat([key, value], -1), now.mesh.cp)
        key, value = together.split([key.shape[2], value.shape[2]], -1)
    scale = query.shape[2] ** -0.5 if scaling is None else float(scaling)
    return attend(query, key, value, now.packing, sliding_window, scale, softcap, s_aux)[None], None


def install() -> None:
    """Register the function with transformers."""
    # A compiled layer must not depend on one micro-batch, which the function looks up.
    transformers.AttentionInterface.register(NAME, torch.compiler.disable(_attention))
