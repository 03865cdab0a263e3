"""Translate verl's engine, its sampling in training and in evaluation, and its rewards to our keys."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared, verl_async
from fivefold_dialects.legacy import verl_recipes as recipes
from fivefold_dialects.source import Source
from fivefold_dialects.verl_algorithm import CHOICES, FIELDS, MANAGERS
from fivefold_dialects.verl_models import gpus, longest

_R = "actor_rollout_ref.rollout."
_LOOPS = ("single_turn_agent", "tool_agent")
_TOOLS = ("tool_config_path", "function_tool_path")
_ANY_TURNS = 10_000
"""Value of environment.max_turns where the number of turns is not bounded."""


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
        if length < longest(source):
            source.note(f"{_R}max_model_len={length} ends responses in verl where prompt and response have as many tokens")
    if verl_async.is_colocated(source):
        # Responses continue while the policy trains, so the engine keeps its memory.
        values |= {"engine.mode": "server", "engine.sleep": False}
    elif rollout.has("free_cache_engine") and not is_apart:
        values["engine.sleep"] = rollout.flag("free_cache_engine")
    if name == "vllm":
        values |= FIELDS["vllm"](rollout)
    return values


def lengths(source: Source) -> dict[str, Any]:
    return {"data.max_response_tokens": shared.response_tokens(source)}


def turns(source: Source) -> dict[str, Any]:
    """Return our keys of turns with tools: those of verl's tool_agent, which ends with a turn that has no call."""
    multi_turn = source.under(_R + "multi_turn.")
    loop = source.one_of(_R + "agent.default_agent_loop", _LOOPS, "agent loop", _LOOPS[0])
    files = [multi_turn.prefix + key for key in _TOOLS if multi_turn.text(key)]
    if not multi_turn.flag("enable") and loop == _LOOPS[0]:
        for key in (*files, *("data." + key for key in _TOOLS if source.text("data." + key))):
            source.lacks(key, "tools that the model reads and that no turn can call: set multi_turn.enable")
        return {}
    if not files:
        # Without tools the first turn is the last.
        return {}
    users = multi_turn.whole("max_user_turns")
    limits = [turns for turns in (multi_turn.whole("max_assistant_turns"), users and users + 1) if turns]
    prompt = source.whole(_R + "prompt_length") or source.count("data.max_prompt_length")
    total = prompt + shared.response_tokens(source)
    ours = FIELDS["turns"](source) | {
        "environment.tools": [f"verl:{source.path(key)}" for key in files],
        "environment.max_turns": min(limits, default=_ANY_TURNS),
        "environment.cut_observations": CHOICES[multi_turn.prefix + "tool_response_truncate_side"].read(source),
        "environment.max_observation_tokens": total,
        "data.max_total_tokens": total,
    }
    return ours if source.text(_R + "name") == "hf" else ours | {"engine.mode": "server"}


def rewards(source: Source) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for start in ("reward.custom_reward_function.", "custom_reward_function."):
        if (file := source.text(start + "path")) is not None:
            ours["reward.functions"] = {f"{file}:{source.text(start + 'name') or 'compute_score'}": 1.0}
    if "reward.functions" not in ours and (function := recipes.REWARDS.get(source.text("-m") or "")) is not None:
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
    """Return our keys of servers for a reward function that calls a model, to which verl passes their address."""
    engine = pool.text("rollout.name")
    if not pool.flag("enable_resource_pool"):
        pool.lacks("enable", "a model that a reward function calls, on the policy's GPUs: set enable_resource_pool")
        return {}
    if engine not in ("vllm", "sglang"):
        pool.lacks("rollout.name", f"servers of {engine} that a reward function calls: known here are vllm and sglang")
        return {}
    world, tp = pool.count("nnodes") * pool.count("n_gpus_per_node"), pool.whole("rollout.tensor_model_parallel_size") or 1
    backend = shared.engine_layout(world, tp, name=engine)
    servers = {"reward.judge.model": source.path(model), "reward.judge.backend": backend}
    return FIELDS["judge"](pool) | servers
