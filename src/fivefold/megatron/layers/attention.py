"""Core attention of Megatron-Core's layers over packed sequences: query, key, value [T, H, D] -> [T, H·D]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fivefold.backend import packing
from fivefold.backend.attention import attend
from fivefold.types import to_device


@dataclass
class Packing(packing.Packing, PackedSeqParams):
    """The packing, as Megatron-Core passes it through its layers.

    With layers of plain PyTorch `cu_seqlens_q` stays None: rotary angles are gathered by position before the layers, so that
    no layer reads sequence lengths on the host. Transformer Engine's attention needs it.
    """


def make_packing(
    fused: bool, lengths: list[int], device: torch.device, cp: int = 1, rank: int = 0, prefixes: packing.Prefixes = ()
) -> Packing:
    """Build the packing of sequences of these padded lengths; `fused`: the layers are Transformer Engine's."""
    plain = packing.make_packing(lengths, device, cp, rank, prefixes=prefixes)
    assert not (fused and any(length for _, length in prefixes)), "prefixes are shared by layers of plain PyTorch"
    ends = to_device(packing.cumulative(lengths), device) if fused else None
    longest = max(length + before for length, (_, before) in zip(lengths, prefixes or [(0, 0)] * len(lengths), strict=True))
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **vars(plain),
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
        self.cp_group = parallel_state.get_context_parallel_group()

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
        if self.cp_group.size() > 1:
            # Backward: each rank receives the gradients of its own keys and values, summed over the queries of all ranks.
            together = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            key, value = together.split([key.shape[-1], value.shape[-1]], -1)
        return attend(query, key, value, packed_seq_params, self.window, self.scale).flatten(1)
