"""Layers of plain PyTorch for Megatron-Core, and the model that ends in log-probs: TransformerConfig -> PolicyModel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from fivefold.backend.micro_batches import Ahead
from fivefold.backend.routing import Routing
from fivefold.config.packages import can_import, missing_packages
from fivefold.errors import UserError
from fivefold.megatron.layers.adapters import is_adapter
from fivefold.megatron.layers.attention import PackedAttention, Packing
from fivefold.megatron.layers.lm_head import LogProbHead, ValueHead
from fivefold.megatron.layers.mla import MLANorm, MultiLatentAttention
from fivefold.megatron.layers.moe import GroupedExperts, MoE, Router
from fivefold.megatron.layers.mtp import mtp_spec
from fivefold.megatron.layers.norm import NORMS, RMSNorm
from fivefold.megatron.layers.recompute import LastLinear
from fivefold.megatron.layers.self_attention import SelfAttention


def use_transformer_engine(choice: str, device: torch.device) -> bool:
    """Whether layers come from Transformer Engine; raises ValueError if it was requested but is not available."""
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return False
    missing = missing_packages(("transformer_engine",)) if choice == "transformer_engine" else []
    if missing or (choice == "transformer_engine" and device.type != "cuda"):
        lacking = missing[0] if missing else "a CUDA device"
        raise UserError(
            f"megatron.transformer_impl: transformer_engine needs {lacking}: use torch, which needs nothing, or auto"
        )
    return can_import("transformer_engine")


def block_spec(config: TransformerConfig, layers: Sequence[int]) -> TransformerBlockSubmodules:
    """Return the specs of these layers (numbered over the whole model), in plain PyTorch or from Transformer Engine."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        fused = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return TransformerBlockSubmodules(layer_specs=[fused] * len(layers), layer_norm=TENorm)
    kinds = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = [_layer(config, has_experts=bool(kinds[layer])) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=NORMS[config.normalization])


def mtp_block_spec(config: TransformerConfig, has_experts: bool, detach: bool) -> MultiTokenPredictionBlockSubmodules:
    """Return the specs of the layers of multi-token prediction, each around a layer with or without experts."""
    # A norm follows such a layer and is recomputed with it, so the layer's whole output is read.
    return mtp_spec(config.mtp_num_layers, _layer(config, has_experts, last=RowParallelLinear), detach)


def _layer(config: TransformerConfig, has_experts: bool, last: type[RowParallelLinear] = LastLinear) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    dense = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=last)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
    experts = MoESubmodules(experts=ModuleSpec(module=GroupedExperts), shared_experts=shared, router=Router)
    norm = NORMS[config.normalization]
    # Checkpoints name norms as fused layers do, so that either kind of layer can read the other's.
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not has_experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_latent_attention() if config.multi_latent_attention else _attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MoE, submodules=experts) if has_experts else ModuleSpec(module=MLP, submodules=dense),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if config.multi_latent_attention else names,
        ),
    )


def _attention(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _latent_attention() -> ModuleSpec:
    projections = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    norms = dict.fromkeys(("q_layernorm", "kv_layernorm"), MLANorm)
    submodules = MLASelfAttentionSubmodules(
        **dict.fromkeys(projections, ColumnParallelLinear),
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        **norms,
    )
    return ModuleSpec(MultiLatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


class Layer(TransformerLayer):
    """Megatron-Core's layer, which passes the routing to its experts in place of a padding mask.

    The routing travels with the packing, because Megatron-Core drops the padding mask when it recomputes some of the layers.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **{**kwargs, "padding_mask": kwargs["packed_seq_params"].routing})


class PolicyModel(GPTModel):
    """GPTModel over packed sequences; the last stage returns log-probs and entropies instead of logits, or values."""

    has_adapters = False
    """The model has adapters, and only these and a value head are trained."""

    def __init__(self, *args: Any, value_head: bool, embedding_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._embedding_scale: float | None = None
        if embedding_scale is not None:
            # Families that scale embeddings round the factor to the dtype of the weights.
            self._embedding_scale = torch.tensor(embedding_scale, dtype=self.config.params_dtype).item()
        self._value_head = value_head
        if self.post_process and value_head:
            self.output_layer: torch.nn.Module = ValueHead(self.config, self.pg_collection.tp)
        elif self.post_process:
            # The parameter and its checkpoint key stay the same; only the computation changes.
            self.output_layer.__class__ = LogProbHead

    def is_trained(self, name: str) -> bool:
        """Whether a parameter of this name is trained: with adapters, only these and a value head, which may be new."""
        return not self.has_adapters or is_adapter(name) or (self._value_head and name.startswith("output_layer."))

    def forward(
        self,
        token_ids_T: Tensor,
        packing: Packing,
        routing: Routing | None,
        source_index_S: Tensor,
        targets_S: Tensor,
        valid_vocab: int,
        temperature: float,
        ahead: tuple[Ahead, ...] = (),
    ) -> Tensor:
        """Return [2, S] log-prob and entropy of `targets_S`, the tokens after `source_index_S`, on the last stage.

        Other stages return hidden states. With a value head the last stage returns [2, S] the value at `source_index_S`, and
        0. If `ahead` is given, the same numbers follow for the targets of each layer of multi-token prediction, at
        temperature 1.

        All tokens are this rank's part of the sequences.
        """
        if routing is not None and self.config.sequence_parallel:
            group = self.pg_collection.tp
            routing = routing.part(group.size(), group.rank())
        packing.routing, packing.ahead = routing, ahead
        hidden = super().forward(
            input_ids=token_ids_T[None],
            position_ids=packing.positions_T[None] if packing.positions_T is not None else None,
            attention_mask=None,
            packed_seq_params=packing,
        )
        if not self.post_process:
            # With fp32_residual_connection a stage without layers ends in float32, and any other in the model's dtype.
            return cast(Tensor, hidden).to(self.config.params_dtype)
        if self._value_head:
            values_S = cast(ValueHead, self.output_layer)(hidden, source_index_S)
            return torch.stack([values_S, torch.zeros_like(values_S)])
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        head = cast(LogProbHead, self.output_layer)
        requests = [
            (source_index_S, targets_S, temperature),
            *((further.source_index_S, further.targets_S, 1.0) for further in ahead),
        ]
        numbers = [
            head(part, weight, source_index_S, targets_S, valid_vocab, heat)
            for part, (source_index_S, targets_S, heat) in zip(hidden.chunk(len(requests)), requests, strict=True)
        ]
        return torch.cat([torch.stack(pair) for pair in numbers], dim=1)

    def _preprocess(self, *args: Any, packed_seq_params: Packing, **kwargs: Any) -> Any:
        first, angles, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self._embedding_scale is not None and self.pre_process:
            first = first * self._embedding_scale
        if angles is not None and packed_seq_params.cu_seqlens_q is None:
            # Megatron-Core returns angles [longest, 1, 1, D] by position; select those of each packed token.
            angles = angles[packed_seq_params.positions_T, 0]
        if self.has_adapters and first is not None and torch.is_grad_enabled() and not first.requires_grad:
            # Layers that are recomputed in backward pass gradients to their parameters only if their input requires one.
            first.requires_grad_(True)
        return (first, angles, *rest)

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the hidden states, followed by those of the layers of multi-token prediction if `ahead` is given."""
        if not (self.mtp_process and kwargs["packed_seq_params"].ahead):
            return hidden_states
        wanted = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb", "packed_seq_params")
        arguments = {name: kwargs[name] for name in wanted}
        return cast(Tensor, self.mtp(hidden_states=hidden_states, embedding=self.embedding, **arguments))
