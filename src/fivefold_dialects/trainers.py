"""Choose the trainer of a run that shards by FSDP: an `fsdp:` layout, or Megatron-Core where such layouts lack something."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from fivefold.config.fsdp_checks import not_built
from fivefold.layout import ParallelLayout
from fivefold_dialects import shared
from fivefold_dialects.source import Source


def fsdp(
    source: Source, world: int, section: str, on_host: str = "offload_policy", *, is_built: bool = True, **sizes: int
) -> dict[str, Any]:
    """Return our keys of a policy that FSDP shards over `world` GPUs, with options in `section`; Megatron-Core trains it for
    other engines than FSDP's. The key `on_host` keeps parameters in host memory."""
    layout = shared.world_layout(world, "fsdp" if is_built else "megatron", **sizes)
    ours: dict[str, Any] = {"policy.backend": str(layout)}
    if not is_built:
        return ours
    options = source.under(section)
    size = max(options.whole("fsdp_size") or 0, 0) or world
    copies = gcd(world // size if world % size == 0 else 1, layout.dp)
    return ours | {
        "policy.fsdp.replicas": copies if copies > 1 else None,
        "policy.fsdp.reshard_after_forward": False if options.value("reshard_after_forward") is False else None,
        "policy.fsdp.cpu_adam": options.flag(on_host) or None,
    }


def on_megatron(values: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the translated values, changed if a model with an `fsdp:` layout needs what only Megatron-Core has."""
    backends = {key.removesuffix(".backend"): str(line.value) for key, line in values.items() if key.endswith(".backend")}
    usual = backends.get("policy", "")
    for key, line in values.items():
        section, _, name = key.partition(".")
        if backends.get(section, usual).startswith("fsdp:") and (lacking := not_built(name, line.value)):
            break
    else:
        return values
    source.note(
        f"{lacking} is not built for fsdp: layouts, so Megatron-Core trains instead on as many GPUs: the "
        "numbers are the same, and d alone leaves each GPU whole weights and gradients (docs/fsdp.md)"
    )
    is_float32 = "policy.dtype" in values and values["policy.dtype"].value == "float32"
    host = "policy.offload.optimizer" if is_float32 else "policy.megatron.optimizer.optimizer_cpu_offload"
    kept = {key: replace(line, key=host if key == "policy.fsdp.cpu_adam" else key) for key, line in values.items()}
    for key, line in kept.items():
        if str(line.value).startswith("fsdp:"):
            kept[key] = replace(line, value=str(replace(ParallelLayout.parse(line.value), backend="megatron")))
    return {line.key: line for line in kept.values() if ".fsdp." not in line.key}
