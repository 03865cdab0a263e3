"""Trinity-RFT's GPUs, engine and adapters -> ours."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.adapters import adapters
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.trinity_algorithm import offline
from fivefold.config.dialects.trinity_keys import ACTOR, ROLLOUT, TASKSET


def is_megatron(source: Source) -> bool:
    return (source.text(ACTOR + "strategy") or source.text("trainer.trainer_strategy")) == "megatron"


def gpus(source: Source) -> int:
    """Those of the trainer: the cluster's without those that only sample."""
    total = source.count("cluster.node_num") * source.count("cluster.gpu_per_node")
    if (source.text("mode") or "both") != "both" or offline(source):
        return total
    rest = total - source.count(ROLLOUT + "engine_num") * source.count(ROLLOUT + "tensor_parallel_size")
    for other in source.items("explorer.auxiliary_models"):
        rest -= int(other.get("engine_num", 1)) * int(other.get("tensor_parallel_size", 1)) if isinstance(other, dict) else 0
    if rest < 1:
        raise UnreadableError(f"cluster.node_num x gpu_per_node = {total} leaves no GPU for the trainer beside the engines")
    return rest


def engine(source: Source) -> dict[str, Any]:
    if offline(source):
        return {}
    said, drawn = source.under(ROLLOUT), source.under(TASKSET + "rollout_args.")
    tp = said.count("tensor_parallel_size")
    found: dict[str, Any] = {
        **shared.engine_apart(said.count("engine_num") * tp, tp),
        "engine.memory_fraction": said.number("gpu_memory_utilization"),
        "engine.sampling.temperature": drawn.number("temperature")
        if drawn.value("temperature") is not None
        else source.number("model.temperature"),
        "engine.sampling.top_p": drawn.number("top_p") if drawn.has("top_p") else source.number("model.top_p"),
        "engine.sampling.top_k": max(0, (drawn.whole("top_k") if drawn.has("top_k") else source.whole("model.top_k")) or 0),
    }
    dtype = said.text("dtype") if said.has("dtype") else "bfloat16"
    if dtype not in (*shared.DTYPES, "auto"):
        said.lacks("dtype", f"numbers of the type {dtype}: known here are {', '.join(shared.DTYPES)}")
    found["engine.dtype"] = None if shared.DTYPES.get(str(dtype)) == "bfloat16" else shared.DTYPES.get(str(dtype))
    for name in ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill"):
        if said.has(name):
            found[f"engine.vllm.{name}"] = said.flag(name)
    return found


def low_rank(source: Source) -> dict[str, Any]:
    """The one adapter of model.lora_configs; its rank, alpha and modules have Trinity's defaults (LoRAConfig)."""
    key = "model.lora_configs"
    if not source.has(key) or not (given := source.value(key)):
        return {}
    entries = given if isinstance(given, list) else [given]
    if len(entries) > 1 or not isinstance(entries[0], dict):
        source.lacks(key, "more than one adapter")
        return {}
    own = Source(entries[0], {"lora_rank": 32, "lora_alpha": 32, "target_modules": "all-linear"}, source.environment)
    names = {"rank": "lora_rank", "alpha": "lora_alpha", "targets": "target_modules", "exclude": "exclude_modules"}
    found = adapters(own, "policy", path="path", **names)
    if own.found or own.value("is_dummy"):
        source.lacks(key, "adapters for the sampler alone, or whose modules are given by a pattern")
    return found
