"""Data-parallel wrappers, optimizer and schedule of a model's chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.backend.loss_scale import CONSTANT, LossScale
from fivefold.backend.schedule import Schedule
from fivefold.config.learners import PolicyConfig
from fivefold.config.mcore_options import DTYPE_NAMES
from fivefold.errors import UserError
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.optim.adam import FusedAdamW, PrecisionAwareConfig, precision_aware_adam


@dataclass(frozen=True)
class Updater:
    """Data-parallel wrappers, optimizer and schedule, which turn gradients into new weights."""

    ddps: list[DistributedDataParallel]
    """One wrapper per virtual stage."""
    optimizer: MegatronOptimizer
    schedule: Schedule
    loss_scale: LossScale | None = None
    """Dynamic loss scale; None except in float16."""

    def begin(self) -> None:
        """Prepare for an update: set the chunks to training and the gradients to 0."""
        for ddp in self.ddps:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, grad_norm: float) -> None:
        """Clip the gradients, which must be finite, and take the optimizer step."""
        for part in self.optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm, use_decoupled_grad=decoupled)
        updated = self.optimizer.step_with_ready_grads()
        assert updated, "the optimizer refused its gradients"

    def complete_parameters(self) -> None:
        """Gather the parameters on every rank: `overlap_param_gather` leaves the last update's to the next forward."""
        for ddp in self.ddps:
            groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
            if ddp.ddp_config.overlap_param_gather and not all(group.param_gather_dispatched for group in groups):
                ddp.start_param_sync(force_sync=True)


def build_updater(
    chunks: list[PolicyModel], config: TransformerConfig, policy: PolicyConfig, total_updates: int, updates_per_step: int = 1
) -> Updater:
    """Wrap the chunks for data parallelism and build Megatron-Core's optimizer and schedule for them."""
    options = policy.megatron.options
    ddp_config = DistributedDataParallelConfig(
        **{"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **options.effective("ddp")}
    )
    ddps = [
        DistributedDataParallel(
            config,
            ddp_config,
            chunk,
            # The first chunk's gradients come last. The other chunks need no buckets to overlap with computation.
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
        raise UserError("policy.megatron.optimizer.optimizer_cpu_offload needs a GPU: leave it out on the CPU")
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
                # Without a bound the norm is still needed: no norm is larger than infinity.
                clip_grad=settings.clip_grad or math.inf,
                bf16=config.bf16,
                fp16=config.fp16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=ddp_config.use_distributed_optimizer,
                overlap_param_gather=ddp_config.overlap_param_gather,
                **raw,
            ),
            ddps,
            use_gloo_process_groups=False,
        )
    for part in optimizer.chained_optimizers:
        FusedAdamW.take_over(part.optimizer)
    loss_scale = None
    if config.fp16:
        constant = optimizer.config.loss_scale
        loss_scale = LossScale(
            initial=constant or optimizer.config.initial_loss_scale,
            lowest=constant or optimizer.config.min_loss_scale,
            window=CONSTANT if constant else int(optimizer.config.loss_scale_window),
            hysteresis=optimizer.config.hysteresis,
            device=next(chunks[0].parameters()).device,
        )
        for part in optimizer.chained_optimizers:
            part.grad_scaler = loss_scale
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = [ddp.no_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].no_sync
    if ddp_config.overlap_param_gather:
        config.param_sync_func = [ddp.start_param_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].start_param_sync
    return Updater(ddps, optimizer, Schedule(optimizer, settings, total_updates, updates_per_step), loss_scale)
