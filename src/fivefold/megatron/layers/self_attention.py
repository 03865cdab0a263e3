"""Megatron-Core's self-attention; on a GPU, queries and keys are normed and rotated in one pass over memory."""

from __future__ import annotations

from typing import Any

import megatron.core.transformer.attention as mcore
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from torch import Tensor

from fivefold.backend import kernels
from fivefold.megatron.layers.norm import RMSNorm


class SelfAttention(mcore.SelfAttention):
    """Self-attention that splits, norms and rotates heads in one pass between the first product and attention itself."""

    _turns: tuple[Tensor, Tensor] | None = None
    """[T, R] cosines and sines for the current call, if the kernel rotates."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any
    ) -> Any:
        """Run Megatron-Core's forward, without rotary angles if the kernel has rotated before."""
        self._turns = None
        if self._in_one_pass(hidden_states, rotary_pos_emb, **kwargs):
            scale = _yarn_get_concentration_factor_from_config(self.config)
            self._turns = kwargs["packed_seq_params"].turns(rotary_pos_emb, scale)
        left = None if self._turns is not None else rotary_pos_emb
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=left, **kwargs)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[T, 1, heads, D] queries, keys and values, already rotated if the kernel does it."""
        if self._turns is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        from fivefold.backend.kernels.rotary import norm_rotate

        mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        normed = isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm)
        query, key, value = norm_rotate(
            mixed,
            *self._turns,
            (q_norm.weight, k_norm.weight) if normed else None,
            heads=self.num_attention_heads_per_partition // self.num_query_groups_per_partition,
            width=self.hidden_size_per_attention_head,
            eps=q_norm.eps if normed else 0.0,
        )
        return query[:, None], key[:, None], value[:, None]

    def _in_one_pass(self, hidden: Tensor, angles: Any, packed_seq_params: Any = None, **unused: Any) -> bool:
        """Whether the kernel applies: it rotates by halves, whole groups of heads, with angles by token."""
        norms = (self.q_layernorm, self.k_layernorm)
        return (
            kernels.serve(hidden)
            and isinstance(angles, Tensor)
            and packed_seq_params.cu_seqlens_q is None
            and not self.config.rotary_interleaved
            and self.config.num_query_groups >= self.world_size
            and (all(isinstance(norm, RMSNorm) for norm in norms) or not any(isinstance(norm, RMSNorm) for norm in norms))
        )
