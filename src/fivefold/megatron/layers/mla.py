"""Multi-head latent attention (DeepSeek-V2, eq. 9-19) for packed sequences, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from fivefold.megatron.layers.attention import Packing
from fivefold.megatron.layers.norm import RMSNorm

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of the latents, whatever the model's rms_norm_eps: the published code builds them so."""


class MLANorm(RMSNorm):
    """Norm of the compressed queries or keys and values."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps=LATENT_NORM_EPS)


class ReplicatedLinear(MegatronModule):
    """A linear map that every tensor-parallel rank holds whole and applies to its own part of the sequence."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig, **unused: Any) -> None:
        super().__init__(config=config)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class MultiLatentAttention(MLASelfAttention):
    """Megatron-Core's latent attention with down-projections that are not sharded, and rotary angles by packed position.

    Without Transformer Engine, Megatron-Core shards the down-projections. The part of their gradient that comes through the
    shared rotary key then includes only the rank's own heads.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # Megatron-Core's constructor accepts only its own linear modules, so these replace them afterwards.
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, width, config)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: Packing | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """[T, H, D] query, key and value of the local heads, and the compressed queries and keys."""
        packing = packed_seq_params or next(item for item in args if isinstance(item, Packing))
        config, group = self.config, self.pg_collection.tp
        hidden = hidden_states.squeeze(1)
        queries = hidden
        if config.q_lora_rank is not None:
            queries = self.q_layernorm(self.linear_q_down_proj(hidden)[0])
        combined, _ = self.linear_kv_down_proj(hidden)
        compressed, rotary_key = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        compressed = self.kv_layernorm(compressed)
        # Each rank's heads use the whole rotary key: its gradient is the sum over ranks.
        if config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=group)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=group)
        angles, concentration = self._angles(packing)
        parts = (queries, compressed, rotary_key)
        if self.recompute_up_proj:
            self.qkv_up_checkpoint = CheckpointWithoutOutput()
            query, key, value = self.qkv_up_checkpoint.checkpoint(
                lambda queries, latent, key: self._heads(queries, latent, key, angles, concentration), *parts
            )
        else:
            query, key, value = self._heads(*parts, angles, concentration)
        return query, key, value, queries, compressed

    def _angles(self, packing: Packing) -> tuple[Tensor, float]:
        """[T, 1, D] rotary angles of the packed tokens, and YaRN's factor on the rotated parts."""
        angles_and_factor = self.rotary_pos_emb(int(packing.max_seqlen_q), packed_seq=True)
        angles, concentration = angles_and_factor if isinstance(angles_and_factor, tuple) else (angles_and_factor, 1.0)
        return angles[packing.positions_T, 0], concentration

    def _heads(
        self, queries: Tensor, compressed: Tensor, rotary_key: Tensor, angles: Tensor, concentration: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, heads = self.config, self.num_attention_heads_per_partition
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = project(queries)[0].view(-1, heads, self.q_head_dim)
        key_value = self.linear_kv_up_proj(compressed)[0].view(-1, heads, config.qk_head_dim + config.v_head_dim)
        plain, turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        plain_key, value = key_value.split([config.qk_head_dim, config.v_head_dim], -1)

        def turn(part: Tensor) -> Tensor:
            result: Tensor = apply_rotary_pos_emb(
                part, angles, config=config, mscale=concentration, cp_group=self.pg_collection.cp
            )
            return result

        query = torch.cat([plain, turn(turned)], -1)
        key = torch.cat([plain_key, turn(rotary_key[:, None]).expand(-1, heads, -1)], -1)
        return query.contiguous(), key.contiguous(), value.contiguous()
