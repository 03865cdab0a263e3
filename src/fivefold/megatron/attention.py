"""Core attention over packed sequences in plain PyTorch: query, key, value [T, H, D] -> [T, H·D]."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_GROUPED_QUERY = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""This release of torch's varlen_attn takes fewer key/value heads than query heads."""


@dataclass
class Packing(PackedSeqParams):
    """Where the sequences of a micro-batch lie.

    With layers of plain PyTorch `cu_seqlens_q` stays None: rotary angles are gathered by position before the layers,
    so that no layer needs to look at sequence lengths on the host. Transformer Engine's attention wants it.
    """

    lengths: tuple[int, ...] = ()
    positions_T: Tensor | None = None
    cu_seqlens: Tensor | None = None
    """[sequences + 1] int32, on the device."""
    buckets: tuple[tuple[Tensor, int], ...] = ()
    """Sequences of similar length: (index [sequences, longest] into T, -1 behind the end; longest)."""


def make_packing(lengths: list[int], device: torch.device, fused: bool) -> Packing:
    """Packing of sequences of these lengths, on `device`; `fused` for layers of Transformer Engine."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_size: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_size.setdefault(max(length - 1, 0).bit_length(), []).append(i)
    buckets = []
    for members in by_size.values():
        longest = max(lengths[i] for i in members)
        offsets = torch.arange(longest)
        lengths_S = torch.tensor([lengths[i] for i in members])
        starts_S = torch.tensor([starts[i] for i in members])
        index = torch.where(offsets < lengths_S[:, None], starts_S[:, None] + offsets, -1)
        buckets.append((index.to(device, non_blocking=True), longest))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens if fused else None,
        cu_seqlens_kv=cu_seqlens if fused else None,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
        positions_T=positions.to(device, non_blocking=True),
        cu_seqlens=cu_seqlens,
        buckets=tuple(buckets),
    )


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence, grouped-query heads and sliding windows included."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert config.attention_dropout == 0.0, "attention dropout would make log-probs random"
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels or 1)
        window = config.window_size
        self.window = None if window is None else int(window[0]) + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert isinstance(packed_seq_params, Packing), "sequences are always packed"
        packing = packed_seq_params
        half = query.dtype in (torch.bfloat16, torch.float16)
        if query.is_cuda and half and query.shape[2] % 8 == 0:
            return self._flash(query, key, value, packing).flatten(1)
        return self._padded(query, key, value, packing).flatten(1)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """PyTorch's own variable-length flash attention."""
        if not _GROUPED_QUERY and query.shape[1] != key.shape[1]:
            repeat = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        options: dict[str, Any] = {"enable_gqa": True} if _GROUPED_QUERY else {}
        left = -1 if self.window is None else self.window - 1
        longest = int(packing.max_seqlen_q)
        assert packing.cu_seqlens is not None
        output = varlen_attn(
            query,
            key,
            value,
            packing.cu_seqlens,
            packing.cu_seqlens,
            longest,
            longest,
            window_size=(left, 0),
            scale=self.scale,
            **options,
        )
        assert isinstance(output, Tensor)
        return output

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """SDPA over sequences of similar length, padded on the right: causality hides the padding from every token."""
        output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        for index, longest in packing.buckets:
            inside = index >= 0
            rows = index.clamp(min=0)
            q, k, v = (tensor[rows].transpose(1, 2) for tensor in (query, key, value))
            mask = None
            if self.window is not None and longest > self.window:
                offset = torch.arange(longest, device=query.device)
                distance = offset[:, None] - offset[None, :]
                mask = (distance >= 0) & (distance < self.window)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            output = output.index_put((index[inside],), attended.transpose(1, 2)[inside])
        return output
