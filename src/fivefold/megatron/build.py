"""ModelShape, layout and settings -> Megatron-Core's configuration, model, optimizer and schedule."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_block import get_transformer_layer_offset
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.config.schema import OptimizerConfig, PolicyConfig
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.spec import PolicyModel, block_spec, use_transformer_engine
from fivefold.model_shape import ModelShape

FUSED_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's layers keep a norm's weight in the product that follows it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, mesh: Mesh, policy: PolicyConfig) -> TransformerConfig:
    """Megatron-Core's configuration of this model."""
    layout, dtype = mesh.layout, DTYPES[policy.dtype]
    fused = use_transformer_engine(policy.megatron.transformer_impl, mesh.device)
    recompute: dict[str, object] = {}
    if policy.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif policy.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.ffn,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            kv_channels=shape.head_dim,
            window_size=None if shape.sliding_window is None else (shape.sliding_window - 1, 0),
            normalization="RMSNorm",
            layernorm_epsilon=shape.norm_eps,
            qk_layernorm=shape.qk_norm,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=shape.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            sequence_parallel=policy.sequence_parallel and layout.tp > 1,
            # Micro-batches are packed to different lengths.
            variable_seq_lengths=layout.pp > 1,
            moe_token_dispatcher_type="alltoall",  # noqa: S106
            transformer_impl="transformer_engine" if fused else "local",
            deallocate_pipeline_outputs=layout.pp > 1,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # The loss is a sum of shares: step.py says how it is divided.
            calculate_per_token_loss=True,
            # Weights are loaded, so nothing is drawn; but only initialisation marks a parameter as cut over the
            # tensor-parallel ranks, and without the mark the gradient norm leaves out all ranks but the first.
            init_method=_leave,
            output_layer_init_method=_leave,
            embedding_init_method=_leave,
            use_cpu_initialization=mesh.device.type == "cpu",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=mesh.device.type == "cuda",
            **recompute,
        )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Initialise nothing."""
    return weight


def build_model(config: TransformerConfig, shape: ModelShape, mesh: Mesh) -> PolicyModel:
    """This rank's part of the model, on its device, weights not yet set."""
    model: PolicyModel = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=shape.padded_vocab,
        max_sequence_length=shape.max_positions,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_llama3_factor is not None,
        rope_scaling_factor=shape.rope_llama3_factor or 1.0,
        seq_len_interpolation_factor=shape.rope_linear_factor,
    ).to(mesh.device)
    return model


def global_parameters(model: PolicyModel, config: TransformerConfig) -> dict[str, torch.nn.Parameter]:
    """Parameters by name, layers counted over the whole model instead of this stage."""
    offset = get_transformer_layer_offset(config)
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            rest = FUSED_NAMES.get(rest, rest)
            name = f"decoder.layers.{int(layer) + offset}.{rest}"
        found[name] = parameter
    return found


@dataclass(frozen=True)
class Trainer:
    """What turns gradients into new weights."""

    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler


def build_trainer(model: PolicyModel, config: TransformerConfig, policy: PolicyConfig, total_updates: int) -> Trainer:
    """Wrap the model for data parallelism and give it Megatron-Core's distributed optimizer and schedule."""
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
    )
    settings = policy.optimizer
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
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
            use_distributed_optimizer=True,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    return Trainer(ddp, optimizer, build_schedule(optimizer, settings, total_updates))


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
