"""ModelSpec, layout and settings -> Megatron-Core's configuration, model, optimizer and schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from fivefold.config.mcore_options import DTYPE_NAMES
from fivefold.config.schema import OptimizerConfig, PolicyConfig
from fivefold.megatron.layers.layer_spec import PolicyModel, block_spec, use_transformer_engine
from fivefold.megatron.layers.moe import GroupedExperts, MoE, Router
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.optim.adam import PrecisionAwareConfig, precision_aware_adam
from fivefold.megatron.patches.quiet import quiet
from fivefold.models.spec import ModelSpec

FUSED_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's layers keep a norm's weight in the product that follows it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(spec: ModelSpec, mesh: Mesh, policy: PolicyConfig) -> TransformerConfig:
    """Megatron-Core's configuration of this model."""
    layout, dtype = mesh.layout, DTYPES[policy.dtype]
    fused = use_transformer_engine(policy.megatron.transformer_impl, mesh.device)
    if fused and (spec.moe is not None or spec.mla is not None):
        raise ValueError(
            f"megatron.transformer_impl: transformer_engine has dense models without latent attention only: got "
            f"{spec.family}; use torch"
        )
    settings: dict[str, Any] = {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "window_size": None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
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
        # Over Gloo a sent tensor must stay: interleaved stages would send what took its place, and nothing would say so.
        "deallocate_pipeline_outputs": layout.pp > 1 and mesh.device.type == "cuda",
        "moe_token_dispatcher_type": "alltoall",
        "transformer_impl": "transformer_engine" if fused else "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # The loss is a sum of shares: step.py divides it.
        "calculate_per_token_loss": True,
        # Weights are loaded, so nothing is drawn; but only initialisation marks a parameter as sharded over
        # the tensor-parallel ranks, and without the mark the gradient norm leaves out all ranks but the first.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": mesh.device.type == "cpu",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": mesh.device.type == "cuda",
        **_RECOMPUTE[policy.recompute],
        **_moe_settings(spec),
        **_mla_settings(spec),
        **policy.megatron.options.effective("transformer"),
        **policy.megatron.options.effective("pipeline"),
    }
    if settings["moe_token_dispatcher_type"] == "allgather":
        # Megatron-Core wants to know sizes beforehand where ranks gather each other's tokens.
        settings["variable_seq_lengths"] = False
    if (virtual := policy.megatron.pipeline_split.virtual_stages(layout)) > 1:
        # With batched messages between two stages, forward and backward would cross and the loss go wrong unnoticed.
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        settings["virtual_pipeline_model_parallel_size"] = virtual
    else:
        settings["virtual_pipeline_model_parallel_size"] = None
    kind = TransformerConfig if spec.mla is None else MLATransformerConfig
    with quiet("megatron.core"):
        return kind(**settings)


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _moe_settings(spec: ModelSpec) -> dict[str, Any]:
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
        # A softmax over all experts before the choice leaves the chosen weights unnormalised.
        "moe_router_pre_softmax": not part.sigmoid and not part.normalize,
        "moe_router_enable_expert_bias": part.sigmoid,
        "moe_router_num_groups": part.n_group if part.n_group > 1 else None,
        "moe_router_group_topk": part.topk_group if part.n_group > 1 else None,
        "moe_router_topk_scaling_factor": None if part.routed_scaling_factor == 1.0 else part.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        # In RL the sampler routes as the trainer did: what pulls the router towards balance is off unless asked for.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
    }


def _mla_settings(spec: ModelSpec) -> dict[str, Any]:
    part, yarn = spec.mla, spec.yarn
    if part is None:
        return {}
    found = {
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
        found |= {
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    return found


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Initialise nothing."""
    return weight


def build_chunks(config: TransformerConfig, spec: ModelSpec, mesh: Mesh, policy: PolicyConfig) -> list[PolicyModel]:
    """This rank's parts of the model, one a virtual stage, on its device, weights not yet set."""
    stages = policy.megatron.pipeline_split.split_layers(spec.layers, mesh.layout)[mesh.pp.rank()]
    virtual = config.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    chunks: list[PolicyModel] = []
    for number, layers in enumerate(stages):
        stage = number if virtual else None
        first = get_transformer_layer_offset(config, vp_stage=stage)
        assert not layers or first == layers[0], f"Megatron-Core starts chunk {number} at layer {first}, not {layers[0]}"
        # It warns of every layer whose mixture of experts is not its own class.
        with quiet("megatron.core.transformer.transformer_layer"):
            chunk = PolicyModel(
                config=config,
                transformer_layer_spec=block_spec(config, layers),
                vocab_size=spec.padded_vocab,
                max_sequence_length=spec.max_positions,
                pre_process=mesh.is_first_stage and number == 0,
                post_process=mesh.is_last_stage and number == len(stages) - 1,
                share_embeddings_and_output_weights=spec.tied,
                position_embedding_type="rope",
                rotary_base=spec.rope_theta,
                rotary_percent=spec.rotary_fraction,
                rope_scaling=spec.rope_llama3_factor is not None,
                rope_scaling_factor=spec.rope_llama3_factor or 1.0,
                seq_len_interpolation_factor=spec.rope_linear_factor,
                vp_stage=stage,
                value_head=spec.value_head,
            ).to(mesh.device)
        assert len(chunk.decoder.layers) == len(layers)
        chunk.layers_of_model = layers
        chunks.append(chunk)
    return chunks


def named_weights(chunks: list[PolicyModel]) -> dict[str, torch.Tensor]:
    """Parameters and router biases by name, layers and experts counted over the whole model instead of this rank.

    The stacked weights of experts appear as `decoder.layers.3.mlp.experts.7.fc1`: views, so ask again after anything
    that moves parameters.
    """
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, GroupedExperts):
                found.update((_whole_name(f"{name}.{part}", chunk), weight) for part, weight in module.by_expert())
            elif isinstance(module, Router) and module.expert_bias is not None:
                found[_whole_name(f"{name}.expert_bias", chunk)] = module.expert_bias
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." not in name:
                found[_whole_name(name, chunk)] = parameter
    return found


def _whole_name(name: str, chunk: PolicyModel) -> str:
    if not name.startswith("decoder.layers."):
        return name
    _, _, layer, rest = name.split(".", 3)
    return f"decoder.layers.{chunk.layers_of_model[int(layer)]}.{FUSED_NAMES.get(rest, rest)}"


def routers(chunks: list[PolicyModel]) -> dict[int, Router]:
    """The routers of this rank by layer, counted over the whole model."""
    return {
        chunk.layers_of_model[index]: layer.mlp.router
        for chunk in chunks
        for index, layer in enumerate(chunk.decoder.layers)
        if isinstance(layer.mlp, MoE)
    }


@dataclass(frozen=True)
class Trainer:
    """What turns gradients into new weights."""

    ddps: list[DistributedDataParallel]
    """One a virtual stage."""
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler


def build_trainer(chunks: list[PolicyModel], config: TransformerConfig, policy: PolicyConfig, total_updates: int) -> Trainer:
    """Wrap the chunks for data parallelism and give them Megatron-Core's optimizer and schedule."""
    options = policy.megatron.options
    ddp_config = DistributedDataParallelConfig(
        **{"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **options.effective("ddp")}
    )
    ddps = [
        DistributedDataParallel(
            config,
            ddp_config,
            chunk,
            # Only the first chunk's gradients are needed last: the others' need no buckets to overlap with.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    settings = policy.optimizer
    raw = {
        name: getattr(torch, DTYPE_NAMES[value]) if name.endswith("_dtype") else value
        for name, value in options.effective("optimizer").items()
    }
    if raw.get("optimizer_cpu_offload", False) and next(chunks[0].parameters()).device.type == "cpu":
        raise ValueError("policy.megatron.optimizer.optimizer_cpu_offload needs a GPU: leave it out on the CPU")
    aware = raw.get("use_precision_aware_optimizer", False)
    with precision_aware_adam(aware):
        optimizer = get_megatron_optimizer(
            (PrecisionAwareConfig if aware else MegatronOptimizerConfig)(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                # Without a bound the norm is still wanted: nothing is larger than infinity.
                clip_grad=settings.clip_grad or math.inf,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=ddp_config.use_distributed_optimizer,
                overlap_param_gather=ddp_config.overlap_param_gather,
                **raw,
            ),
            ddps,
            use_gloo_process_groups=False,
        )
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = [ddp.no_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].no_sync
    if ddp_config.overlap_param_gather:
        config.param_sync_func = [ddp.start_param_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].start_param_sync
    return Trainer(ddps, optimizer, build_schedule(optimizer, settings, total_updates))


def build_schedule(optimizer: MegatronOptimizer, settings: OptimizerConfig, total_updates: int) -> OptimizerParamScheduler:
    """Learning rate over optimizer steps: update k of w warm-up steps uses k/w of `lr`."""
    decay_steps = total_updates if settings.decay_steps is None else settings.decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(decay_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
