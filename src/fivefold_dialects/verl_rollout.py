"""Translate verl's engine, its sampling in training and in evaluation, and its rewards to our keys."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared, verl_async
from fivefold_dialects.legacy import verl_recipes as recipes
from fivefold_dialects.source import Source
from fivefold_dialects.verl_algorithm import FIELDS, MANAGERS
from fivefold_dialects.verl_models import gpus, longest

_R = "actor_rollout_ref.rollout."
OWN_REWARDS = {"recipe.entropy.main_entropy": "recipe/entropy/reward_score/__init__.py:_default_compute_score"}
"""Programs with their own reward function for all data -> its file and name in verl's repository."""


def engine(source: Source) -> dict[str, Any]:
    rollout, name = source.under(_R), source.text(_R + "name") or "vllm"
    if name == "hf":
        return {"engine.backend": "transformers"}
    ours = shared.engine_name(source, _R + "name", name)
    tp, ep = rollout.whole("tensor_model_parallel_size") or 1, rollout.whole("expert_parallel_size") or 1
    ep, is_apart, world = ep if ep == tp else 1, verl_async.is_apart(source), gpus(source)
    world = verl_async.engine_gpus(source) if is_apart else world
    values = shared.engine(world, tp, ep, ours, is_apart=is_apart) | FIELDS["engine"](rollout)
    values |= verl_async.in_flight(source, world // tp, rollout.whole("max_num_seqs"))
    if (form := rollout.text("quantization")) is not None:
        if form != "fp8" or ours == "sglang":
            rollout.lacks("quantization", f"sampling with weights quantized as {form}: known here is fp8, with vLLM")
        values["engine.vllm.quantization"] = "fp8_per_block"
    if (length := rollout.whole("max_model_len")) is not None:
        values["engine.max_model_len"] = max(length, longest(source))
    if verl_async.is_colocated(source):
        # Responses continue while the policy trains, so the engine keeps its memory.
        values |= {"engine.mode": "server", "engine.sleep": False}
    elif rollout.has("free_cache_engine") and not is_apart:
        values["engine.sleep"] = rollout.flag("free_cache_engine")
    if name == "vllm":
        values |= FIELDS["vllm"](rollout)
    return values


def rewards(source: Source) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for start in ("reward.custom_reward_function.", "custom_reward_function."):
        if (file := source.text(start + "path")) is not None:
            ours["reward.functions"] = {f"{file}:{source.text(start + 'name') or 'compute_score'}": 1.0}
    if "reward.functions" not in ours and (function := OWN_REWARDS.get(source.text("-m") or "")) is not None:
        ours["reward.functions"] = {function: 1.0}
    named = "reward_model.model_path" if source.has("reward_model.model_path") else "reward_model.model.path"
    for enabled, model in (("reward_model.enable", named), ("reward.reward_model.enable", "reward.reward_model.model_path")):
        if recipes.is_prime(source):
            # In PRIME this model learns and rewards tokens: legacy/verl_recipes.py reads it.
            break
        if source.flag(enabled):
            pool = source.under(enabled.removesuffix("enable"))
            if "reward.functions" in ours:
                ours |= asked_by_functions(source, pool, model)
                continue
            ours["reward.model.path"] = source.path(model)
            if pool.flag("enable_resource_pool"):
                ours["reward.model.backend"] = f"megatron:d{pool.count('nnodes') * pool.count('n_gpus_per_node')}"
                ours["reward.model.first_rank"] = gpus(source)
                if source.text("actor_rollout_ref.rollout.name") != "hf":
                    ours["engine.mode"] = "server"
    if "reward.functions" not in ours and "reward.model.path" not in ours:
        ours["reward.chosen_as"] = "verl"
        source.note(shared.TEXTS["verl_rewards"])
    for key in MANAGERS:
        name = source.text(key)
        if source.has(key) and name not in (None, "naive", "dapo", "prime", "batch"):
            source.lacks(key, f"the reward manager {name}")
    return ours


def asked_by_functions(source: Source, pool: Source, model: str) -> dict[str, Any]:
    """Return our keys of servers for a reward function that calls a model; verl passes it their address and tokenizer
    (reward_manager/dapo.py)."""
    engine = pool.text("rollout.name")
    if not pool.flag("enable_resource_pool"):
        pool.lacks("enable", "a model that a reward function calls, on the policy's GPUs: set enable_resource_pool")
        return {}
    if engine not in ("vllm", "sglang"):
        pool.lacks("rollout.name", f"servers of {engine} that a reward function calls: known here are vllm and sglang")
        return {}
    layout = shared.engine_layout(
        pool.count("nnodes") * pool.count("n_gpus_per_node"), pool.whole("rollout.tensor_model_parallel_size") or 1
    )
    servers = {"reward.judge.model": source.path(model), "reward.judge.backend": layout.replace("vllm", engine)}
    return FIELDS["judge"](pool) | servers
