"""Choose the trainer of a run that shards by FSDP: an `fsdp:` layout, or Megatron-Core where such layouts lack something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.config.fsdp_checks import not_built
from fivefold.layout import ParallelLayout
from fivefold_dialects import shared
from fivefold_dialects.source import Source


def fsdp(source: Source, world: int, section: str, cp: int = 1, on_host: str = "offload_policy") -> dict[str, Any]:
    """Return our keys of an `fsdp:` policy on `world` GPUs, with FSDP's options in `section`; the key `on_host` keeps
    parameters in host memory."""
    said = source.under(section)
    size = max(said.whole("fsdp_size") or 0, 0) or world
    return {
        "policy.backend": str(shared.world_layout(world, "fsdp", cp=cp)),
        "policy.fsdp.replicas": world // size if size < world and world % size == 0 else None,
        "policy.fsdp.reshard_after_forward": False if said.value("reshard_after_forward") is False else None,
        "policy.fsdp.cpu_adam": said.flag(on_host) or None,
    }


def on_megatron(values: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the translated values, changed if a model with an `fsdp:` layout needs what only Megatron-Core has."""
    backends = {key.removesuffix(".backend"): str(taken.value) for key, taken in values.items() if key.endswith(".backend")}
    parts = [(*key.partition("."), taken.value) for key, taken in values.items()]
    lacks = [
        lacking
        for section, _, key, value in parts
        if backends.get(section, backends.get("policy", "")).startswith("fsdp:") and (lacking := not_built(key, value))
    ]
    if not lacks:
        return values
    source.note(
        f"{lacks[0]} is not built for fsdp: layouts, so Megatron-Core trains instead, data-parallel on as many GPUs: the "
        "numbers are the same, and each GPU holds whole weights and gradients (docs/fsdp.md)"
    )
    on_host = {"policy.fsdp.cpu_adam": "policy.megatron.optimizer.optimizer_cpu_offload"}
    kept = {on_host.get(key, key): taken for key, taken in values.items() if ".fsdp." not in key or key in on_host}
    for key, taken in kept.items():
        if str(taken.value).startswith("fsdp:"):
            kept[key] = replace(taken, value=str(replace(ParallelLayout.parse(taken.value), backend="megatron")))
    return kept
