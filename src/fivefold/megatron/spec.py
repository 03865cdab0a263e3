"""Layers of plain PyTorch for Megatron-Core, and the model that ends in log-probs: TransformerConfig -> PolicyModel."""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from fivefold.megatron.attention import PackedAttention, Packing
from fivefold.megatron.heads import LogProbHead


class RMSNorm(MegatronModule):
    """Root-mean-square norm whose weight tells Megatron-Core to reduce its gradient over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def use_transformer_engine(choice: str, device: torch.device) -> bool:
    """Whether layers come from Transformer Engine; raises ValueError where it was asked for and cannot be had."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if choice == "transformer_engine" and not (installed and device.type == "cuda"):
        lacking = "a CUDA device" if installed else "the package transformer_engine, which is not installed"
        raise ValueError(
            f"megatron.transformer_impl: transformer_engine needs {lacking}: use torch, which needs nothing, or auto"
        )
    return choice != "torch" and installed and device.type == "cuda"


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, in plain PyTorch or Transformer Engine's."""
    count = get_num_layers_to_build(config, vp_stage=None)
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        fused = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return TransformerBlockSubmodules(layer_specs=[fused] * count, layer_norm=TENorm)
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
            # Checkpoints name norms as fused layers do, so that either kind of layer reads the other's.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


class PolicyModel(GPTModel):
    """GPTModel over packed sequences; the last stage gives log-probs and entropies instead of logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            # Same parameter, same checkpoint key; only what it computes is ours.
            self.output_layer.__class__ = LogProbHead

    def forward(
        self, token_ids_T: Tensor, packing: Packing, predicted_S: Tensor, valid_vocab: int, temperature: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Last stage: [S] log-prob and [S] entropy of the predicted tokens; other stages: hidden states.

        `predicted_S` are positions in T of the tokens whose log-prob is wanted.
        """
        hidden = super().forward(
            input_ids=token_ids_T[None],
            position_ids=packing.positions_T[None] if packing.positions_T is not None else None,
            attention_mask=None,
            packed_seq_params=packing,
        )
        if not self.post_process:
            return cast(Tensor, hidden)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        head = cast(LogProbHead, self.output_layer)
        result: tuple[Tensor, Tensor] = head(
            hidden,
            weight=weight,
            before_S=predicted_S - 1,
            targets_S=token_ids_T[predicted_S],
            valid_vocab=valid_vocab,
            temperature=temperature,
        )
        return result

    def _preprocess(self, *args: Any, packed_seq_params: Packing, **kwargs: Any) -> Any:
        first, angles, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params.cu_seqlens_q is not None:
            return (first, angles, *rest)
        # Megatron-Core gives angles [longest, 1, 1, D] by position; each packed token takes those of its own.
        return (first, angles[packed_seq_params.positions_T, 0], *rest)

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states
