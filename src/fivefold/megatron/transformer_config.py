"""ModelSpec, layout and settings -> Megatron-Core's configuration of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from fivefold.config.learners import PolicyConfig
from fivefold.config.mcore_options import RECOMPUTE, messages_fault
from fivefold.errors import UserError, first_line
from fivefold.megatron.bridge.provider import Architecture, sizes_of
from fivefold.megatron.layers.layer_spec import use_transformer_engine
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.patches.quiet import quiet
from fivefold.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def transformer_config(
    spec: ModelSpec, mesh: Mesh, policy: PolicyConfig, architecture: Architecture | None = None
) -> TransformerConfig:
    """Return Megatron-Core's configuration of this model; `architecture` is that of a family without a table here."""
    layout, dtype = mesh.layout, DTYPES[policy.dtype]
    fused = use_transformer_engine(policy.megatron.transformer_impl, mesh.device)
    if fused and not spec.has_fused_layers:
        raise UserError(
            f"megatron.transformer_impl: transformer_engine has dense models with a file here and without latent attention "
            f"only: got {spec.family}; use torch"
        )
    virtual = policy.megatron.pipeline_split.virtual_stages(layout)
    if fault := messages_fault(policy.megatron.pipeline, virtual):
        raise UserError(f"megatron.pipeline.{' '.join(fault)}")
    settings: dict[str, Any] = {
        **sizes_of(spec),
        "window_size": None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        "normalization": "RMSNorm",
        "qk_layernorm": spec.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": policy.sequence_parallel and layout.tp > 1,
        # Micro-batches are packed to different lengths.
        "variable_seq_lengths": layout.pp > 1,
        "deallocate_pipeline_outputs": layout.pp > 1,
        # With batched messages between two virtual stages, forward and backward messages would cross and give a wrong loss.
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
        "moe_token_dispatcher_type": "alltoall",
        "transformer_impl": "transformer_engine" if fused else "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # The loss is a sum of shares, so there is nothing left to divide (step.py).
        "calculate_per_token_loss": True,
        # Weights are loaded, so nothing is drawn. But only initialization marks a parameter as sharded over the
        # tensor-parallel ranks. Without the mark, the gradient norm leaves out all ranks but the first.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": mesh.device.type == "cpu",
        "gradient_accumulation_fusion": not fused,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": mesh.device.type == "cuda",
        **RECOMPUTE[policy.recompute],
        **_moe_settings(spec, policy.router_balance == "config"),
        **_mla_settings(spec),
        "mtp_num_layers": spec.mtp_layers if policy.mtp.train else None,
        **(architecture.settings if architecture is not None else {}),
        **policy.megatron.options.effective("transformer"),
        **policy.megatron.options.effective("pipeline"),
    }
    if settings["moe_token_dispatcher_type"] == "allgather":
        # Megatron-Core needs the sizes in advance if ranks gather each other's tokens.
        settings["variable_seq_lengths"] = False
    settings["virtual_pipeline_model_parallel_size"] = virtual if virtual > 1 else None
    # Gloo needs a sent tensor to stay: interleaved stages would otherwise silently send what took its place.
    settings["deallocate_pipeline_outputs"] &= mesh.device.type == "cuda"
    kind = TransformerConfig if spec.mla is None else MLATransformerConfig
    try:
        with quiet("megatron.core"):
            return kind(**settings)
    except (AssertionError, ValueError, TypeError) as error:
        # Megatron-Core's own code checks which options fit together.
        raise UserError(f"Megatron-Core refuses these options of megatron.transformer: {first_line(error)}") from error


def _moe_settings(spec: ModelSpec, is_balanced: bool) -> dict[str, Any]:
    part = spec.moe
    if part is None:
        return {}
    return {
        "num_moe_experts": part.num_experts,
        "moe_router_topk": part.top_k,
        "moe_ffn_hidden_size": part.ffn,
        "moe_layer_freq": [int(present) for present in part.layers],
        "moe_shared_expert_intermediate_size": part.shared_ffn or None,
        "moe_shared_expert_gate": part.shared_gate,
        "moe_router_score_function": "sigmoid" if part.sigmoid else "softmax",
        # A softmax over all experts before the choice leaves the chosen weights unnormalized.
        "moe_router_pre_softmax": not part.sigmoid and not part.normalize,
        "moe_router_enable_expert_bias": part.sigmoid,
        "moe_router_num_groups": part.n_group if part.n_group > 1 else None,
        "moe_router_group_topk": part.topk_group if part.n_group > 1 else None,
        "moe_router_topk_scaling_factor": None if part.routed_scaling_factor == 1.0 else part.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        # In RL, the engine and the trainer should route alike: balance losses, which move the router, are off by default.
        "moe_router_load_balancing_type": ("seq_aux_loss" if part.sigmoid else "aux_loss") if is_balanced else "none",
        "moe_aux_loss_coeff": part.balance_coef if is_balanced else 0.0,
        "moe_router_bias_update_rate": 0.0,
    }


def _mla_settings(spec: ModelSpec) -> dict[str, Any]:
    part, yarn = spec.mla, spec.yarn
    if part is None:
        return {}
    settings = {
        "multi_latent_attention": True,
        "q_lora_rank": part.q_rank,
        "kv_lora_rank": part.kv_rank,
        "qk_head_dim": part.qk_nope,
        "qk_pos_emb_head_dim": part.qk_rope,
        "v_head_dim": part.v_dim,
        "rotary_base": spec.rope_theta,
        "rope_type": "rope" if yarn is None else "yarn",
        # Without scaling the factor must be 1, or Megatron-Core would still scale the softmax.
        "rotary_scaling_factor": 1.0 if yarn is None else yarn.factor,
        "mscale": 1.0 if yarn is None else yarn.mscale,
        "mscale_all_dim": 0.0 if yarn is None else yarn.mscale_all_dim,
    }
    if yarn is not None:
        settings |= {
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    return settings


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Leave the weight uninitialized."""
    return weight
