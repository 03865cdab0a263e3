"""Translate SkyRL's layouts, options of Megatron-Core, optimizers and adapters, in RL and in SFT."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared, trainers
from fivefold_dialects.source import Source
from fivefold_dialects.table import choices, fields

CHOICES, FIELDS = choices("skyrl"), fields("skyrl")


def policy(source: Source, world: int, megatron: str, section: str = "", *, recomputes: bool) -> dict[str, Any]:
    """Return our keys of the policy in `section` on `world` GPUs; `megatron` is its Megatron-Core section, "" with FSDP."""
    if not megatron:
        cp = source.whole(section + "sequence_parallel_size") or 1
        recompute = {"policy.recompute": "full" if recomputes else None}
        return trainers.fsdp(source, world, section + "fsdp_config.", "cpu_offload", cp=cp) | recompute
    sizes, kwargs = shared.parallel_sizes(source.under(megatron)), megatron + "transformer_config_kwargs"
    ours: dict[str, Any] = {"policy.backend": str(shared.world_layout(world, **sizes)), "policy.sequence_parallel": True}
    if recomputes:
        ours |= shared.recompute(source, kwargs, "policy")
    ours |= shared.megatron_options(source, kwargs, "policy.megatron")
    ours |= shared.ddp_options(source, megatron + "ddp_config.", "policy")
    if sizes["pp"] == 1:
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if ours.pop(f"policy.megatron.pipeline.{name}", None) is not None:
                source.fixed(f"{kwargs}.{name}", "there is one stage, which has all layers")
    options, names = source.under(megatron + "optimizer_config_kwargs."), []
    if options.flag("optimizer_cpu_offload"):
        names = ["optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"]
    if options.flag("use_precision_aware_optimizer"):
        names.append("use_precision_aware_optimizer")
    return ours | {f"policy.megatron.optimizer.{name}": options.value(name) for name in names}


def optimizer(source: Source, section: str = "", ours: str = "policy.optimizer", scale: float = 1.0) -> dict[str, Any]:
    """Return our keys of AdamW in a section; `scale` is the factor by which SkyRL's loss is smaller than ours."""
    optim = source.under(section + "optimizer_config.")
    clip = optim.number("max_grad_norm")
    values = FIELDS["optimizer"](optim) | {
        "clip_grad": clip and clip * scale,
        "schedule": CHOICES["scheduler"].read(optim) or "constant",
        "warmup_steps": optim.whole("num_warmup_steps") or 0,
        "warmup_from": 0,
    }
    return {f"{ours}.{key}": value for key, value in values.items()}


def low_rank(source: Source, section: str = "", ours: str = "policy") -> dict[str, Any]:
    return shared.adapters(source.under(section + "model.lora."), ours, "skyrl")
