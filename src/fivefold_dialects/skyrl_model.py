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
    ours |= shared.options_of("ddp", source.under(megatron + "ddp_config."), "policy")
    if sizes["pp"] == 1:
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if ours.pop(f"policy.megatron.pipeline.{name}", None) is not None:
                source.fixed(f"{kwargs}.{name}", "there is one stage, which has all layers")
    return ours | shared.options_of("optimizer", source.under(megatron + _KWARGS), "policy", _OF_ADAM)


_KWARGS = "optimizer_config_kwargs."
_OF_ADAM = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
"""Options of Megatron-Core's optimizer that policy.optimizer has."""


def optimizer(source: Source, section: str, ours: str, scale: float = 1.0, megatron: str = "") -> dict[str, Any]:
    """Return our keys of a model's AdamW; `scale` is the factor by which SkyRL's loss is smaller than ours.
    Options in `megatron`, the section of Megatron-Core if it trains, come first (megatron/optimizer.py:52)."""
    optim = source.under(section + "optimizer_config.")
    values = FIELDS["optimizer"](optim)
    if megatron:
        kwargs = source.under(megatron + _KWARGS)
        values |= {key: value for key, value in FIELDS["kwargs"](kwargs).items() if value is not None}
        values["betas"] = [kwargs.number(f"adam_beta{place}", beta) for place, beta in enumerate(values["betas"], 1)]
    values |= {
        "clip_grad": values["clip_grad"] and values["clip_grad"] * scale,
        "schedule": CHOICES["scheduler"].read(optim) or "constant",
        "warmup_steps": optim.whole("num_warmup_steps") or 0,
        "warmup_from": 0,
    }
    return {f"{ours}.optimizer.{key}": value for key, value in values.items()}


def low_rank(source: Source, section: str = "", ours: str = "policy") -> dict[str, Any]:
    return shared.adapters(source.under(section + "model.lora."), ours, "skyrl")
