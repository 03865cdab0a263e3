"""Data-parallel wrappers, optimizer and schedule of a model's chunks."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.config.learners import OptimizerConfig, PolicyConfig
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
    schedule: OptimizerParamScheduler
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
        loss_scale = LossScale.of(optimizer.config)
        for part in optimizer.chained_optimizers:
            part.grad_scaler = loss_scale
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = [ddp.no_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].no_sync
    if ddp_config.overlap_param_gather:
        config.param_sync_func = [ddp.start_param_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].start_param_sync
    return Updater(ddps, optimizer, build_schedule(optimizer, settings, total_updates, updates_per_step), loss_scale)


class LossScale(DynamicGradScaler):
    """Dynamic loss scale for float16, so that small gradients do not vanish: one for all optimizers of a model.

    It is halved after `hysteresis` overflows of the gradients, and doubled after `loss_scale_window` updates without one.
    """

    @classmethod
    def of(cls, config: MegatronOptimizerConfig) -> LossScale:
        """Return the scale that the options describe; `loss_scale` is one that never moves."""
        constant = config.loss_scale
        return cls(
            initial_scale=constant or config.initial_loss_scale,
            min_scale=constant or config.min_loss_scale,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=sys.maxsize if constant else int(config.loss_scale_window),
            hysteresis=config.hysteresis,
        )

    def update(self, found_inf: bool) -> None:
        """Ignore Megatron-Core's call for each of its optimizers: `follow` moves the scale once per update."""

    def follow(self, overflowed: bool) -> None:
        """Move the scale after an update, depending on whether its gradients overflowed."""
        super().update(overflowed)

    @property
    def can_fall(self) -> bool:
        return bool(self.scale > self.min_scale)

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint stores."""
        return {name: float(value) for name, value in self.state_dict().items()}

    def load_state(self, state: dict[str, float]) -> None:
        self._scale.fill_(state["scale"])
        self._growth_tracker, self._hysteresis_tracker = int(state["growth_tracker"]), int(state["hysteresis_tracker"])


class Schedule(OptimizerParamScheduler):
    """Megatron-Core's schedule, which counts optimizer steps, read at the count of `schedule_per` and `warmup_from`."""

    def __init__(self, *arguments: Any, updates_per_count: int, first: int, **others: Any) -> None:
        self._updates_per_count, self._first = updates_per_count, first
        self.num_steps: int = 0
        super().__init__(*arguments, **others)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the schedule to a saved state; Megatron-Core's adds the saved steps to those already counted."""
        self.num_steps = 0
        super().load_state_dict(state_dict)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of the next update, number `num_steps`."""
        updates = self.num_steps
        self.num_steps = max(0, math.ceil(updates / self._updates_per_count) - 1 + self._first)
        try:
            return float(super().get_lr(param_group))
        finally:
            self.num_steps = updates


def build_schedule(
    optimizer: MegatronOptimizer, settings: OptimizerConfig, total_updates: int, updates_per_step: int = 1
) -> Schedule:
    """Build the schedule of the learning rate over optimizer steps.

    Of w warm-up steps, step k is k/w of the way from `warmup_init_lr` to `lr`, or (k - 1)/w with `warmup_from: 0`.
    """
    counts = {"update": 1, "step": updates_per_step}
    updates_per_count = counts[per] if isinstance(per := settings.schedule_per, str) else per
    total = total_updates // updates_per_count
    warmup = int(settings.warmup_steps if settings.warmup_steps >= 1 else settings.warmup_steps * total)
    decay_steps = total if settings.decay_steps is None else settings.decay_steps
    return Schedule(
        optimizer,
        init_lr=settings.warmup_init_lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(decay_steps, warmup + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        updates_per_count=updates_per_count,
        first=settings.warmup_from,
    )
