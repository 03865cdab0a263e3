"""What verl samples with, in training and in evaluation."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import sampler, shared, verl_async
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.verl_layout import gpus, longest

_R = "actor_rollout_ref.rollout."


def sampling(source: Source) -> dict[str, Any]:
    said = source.under(_R)
    return {
        "engine.sampling.temperature": said.number("temperature"),
        "engine.sampling.top_p": said.number("top_p"),
        "engine.sampling.top_k": max(0, said.whole("top_k") or 0),
    }


def engine(source: Source) -> dict[str, Any]:
    said, name = source.under(_R), source.text(_R + "name") or "vllm"
    if name == "hf":
        return {"engine.backend": "transformers"}
    sampler.say_replaced(source, _R + "name", name)
    tp, ep = said.whole("tensor_model_parallel_size") or 1, said.whole("expert_parallel_size") or 1
    ep, is_apart, world = ep if ep == tp else 1, verl_async.is_apart(source), gpus(source)
    if is_apart:
        world = verl_async.engine_gpus(source)
        placed = shared.engine_apart(world, tp, ep)
    else:
        placed = {"engine.backend": shared.engine_layout(world, tp, ep)}
    found: dict[str, Any] = {
        **placed,
        "engine.memory_fraction": said.number("gpu_memory_utilization"),
        "engine.max_num_seqs": said.whole("max_num_seqs"),
    }
    found |= verl_async.in_flight(source, world // tp, said.whole("max_num_seqs"))
    if (form := said.text("quantization")) is not None:
        if form != "fp8":
            said.lacks("quantization", f"sampling with weights quantized as {form}: known here is fp8")
        found["engine.vllm.quantization"] = "fp8_per_block"
    if (length := said.whole("max_model_len")) is not None:
        found["engine.max_model_len"] = max(length, longest(source))
    if verl_async.is_colocated(source):
        # Responses go on while the policy trains, so the engine stays.
        found |= {"engine.mode": "server", "engine.sleep": False}
    elif said.has("free_cache_engine") and not is_apart:
        found["engine.sleep"] = said.flag("free_cache_engine")
    if name == "vllm":
        options: dict[str, Any] = {"enforce_eager": said.flag("enforce_eager") or None}
        for key in ("enable_chunked_prefill", "enable_prefix_caching"):
            options[key] = said.flag(key) if said.has(key) else None
        options["max_num_batched_tokens"] = (
            said.whole("max_num_batched_tokens") if said.has("max_num_batched_tokens") else None
        )
        found |= {f"engine.vllm.{key}": value for key, value in options.items()}
    return found


def evaluation(source: Source) -> dict[str, Any]:
    said = source.under(_R + "val_kwargs.")
    if source.has(_R + "n_val") or source.has(_R + "val_temperature"):
        # rLLM's verl, which knows no val_kwargs: its top_p is a number of the code.
        temperature = source.number(_R + "val_temperature") if source.has(_R + "val_temperature") else 0.6
        if not temperature:
            return {"eval.samples": 0}
        return {
            "eval.samples": source.count(_R + "n_val") if source.has(_R + "n_val") else 8,
            "eval.temperature": temperature,
            "eval.top_p": 0.95,
        }
    if not said.flag("do_sample"):
        return {"eval.samples": 0}
    if not said.number("temperature"):
        return {"eval.samples": 0}
    return {
        "eval.samples": said.whole("n"),
        "eval.temperature": said.number("temperature"),
        "eval.top_p": said.number("top_p"),
        "eval.top_k": max(0, said.whole("top_k") or 0) or None,
    }
