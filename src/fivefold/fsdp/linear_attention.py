"""Layers of linear attention over packed sequences: each sequence is computed by itself, from its own first token.

transformers' layers run over all tokens they are passed, so the state of a sequence would continue into the next. Sequences
of similar length are padded on the right and computed as rows of a batch: the layers are causal, so padding changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.backend.attention import take_rows
from fivefold.fsdp.collectives import gather_tokens
from fivefold.fsdp.current import current

_CLASSES = ("GatedDeltaNet",)
"""How the names of classes end that compute linear attention."""


def separate(model: Any) -> None:
    """Let the model's layers of linear attention compute each packed sequence by itself."""
    for module in model.modules():
        if type(module).__name__.endswith(_CLASSES):
            module.forward = _apart(module.forward)


def _apart(compute: Any) -> Any:
    def forward(hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        now = current()
        if now is None:
            alone: Tensor = compute(hidden_states, attention_mask=attention_mask, **options)
            return alone
        assert attention_mask is None, "packed sequences have no padding to mask"
        # A piece of a context-parallel rank continues from all tokens before it, as attention's queries do from their keys.
        gathered_TD = gather_tokens(hidden_states[0], now.mesh.cp)
        output_TD = torch.zeros_like(hidden_states[0])
        for bucket in now.packing.buckets:
            rows, width = bucket.keys.shape
            states = take_rows(gathered_TD, bucket.keys.clamp(min=0).flatten()).view(rows, width, -1)
            computed = compute(states, attention_mask=None, **options)
            inside = bucket.queries >= 0
            before = (bucket.key_lengths - bucket.query_lengths)[:, None]
            place = (before + torch.arange(bucket.queries.shape[1], device=before.device)).expand_as(bucket.queries)
            row = torch.arange(rows, device=before.device)[:, None].expand_as(bucket.queries)
            output_TD = output_TD.index_put((bucket.queries[inside],), computed[row[inside], place[inside]])
        return output_TD[None]

    return forward
