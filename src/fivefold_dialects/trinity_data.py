"""Translate Trinity-RFT's lengths, tasks, workflows, rewards and evaluation to our keys."""

from __future__ import annotations

from typing import Any

from fivefold_dialects.legacy import trinity as legacy
from fivefold_dialects.source import Source, UnreadableError, flatten
from fivefold_dialects.table import fields, load, spelled_out
from fivefold_dialects.trinity_keys import ACTOR, BUFFER, EVALUATED, EXPERTS, ROLLOUT, TASKSET, kind, mixes, samples


def longest(source: Source, name: str) -> int | None:
    """Return the longest prompt or response in tokens, set for the model or the engine (the engine first until 2025-09)."""
    places = [f"model.max_{name}_tokens", f"{ROLLOUT}max_{name}_tokens"]
    if legacy.engine_first(source):
        places.reverse()
    return next((tokens for place in places if (tokens := source.whole(place)) is not None), None)


def response_tokens(source: Source) -> int:
    """Return the longest response in tokens, by default max_model_len less the prompt, or half (config_validator.py:555)."""
    response, whole = longest(source, "response"), source.whole("model.max_model_len")
    if response is not None or whole is None:
        return source.count("model.max_response_tokens") if response is None else response
    prompt = longest(source, "prompt")
    return whole - (whole // 2 if prompt is None else min(prompt, whole - 1))


def lengths(source: Source) -> dict[str, Any]:
    response = response_tokens(source)
    prompt, whole = longest(source, "prompt"), source.whole("model.max_model_len")
    if prompt is None:
        prompt = whole - response if whole is not None else None
    if prompt is None or prompt < 1:
        raise UnreadableError("model.max_prompt_tokens or model.max_model_len must be set: they say how long prompts may be")
    whole_sample = (prompt + response) * (2 if kind(source) == "dpo" else 1)
    if source.flag((ACTOR if source.has(ACTOR + "use_dynamic_bsz") else "trainer.") + "use_dynamic_bsz"):
        tokens = source.whole("trainer.max_token_len_per_gpu") or source.count(ACTOR + "ppo_max_token_len_per_gpu")
        tokens *= source.whole("trainer.ulysses_sequence_parallel_size") or 1
    else:
        tokens = source.count(ACTOR + "ppo_micro_batch_size_per_gpu") * (prompt + response)
    return {
        "data.max_prompt_tokens": prompt,
        "data.max_response_tokens": response,
        "policy.tokens_per_micro_batch": max(tokens, whole_sample),
        "data.overlong_prompts": "refuse",
    }


_WORKFLOWS = ("math_workflow", "async_math_workflow", "math_boxed_workflow", "default", "simple_workflow")
FIELDS = fields("trinity")
_REWARDS = spelled_out(load("trinity")["rewards"])
_PROMPTS: dict[str, str] = load("trinity")["prompts"]


def data(source: Source) -> dict[str, Any]:
    if not samples(source):
        return FIELDS["pairs"](source.under(BUFFER))
    taskset = source.under(TASKSET)
    sets = [str(entry.get("path")) for entry in source.items(EVALUATED) if isinstance(entry, dict)]
    selector = taskset.one_of("data_selector.selector_type", ("sequential", "shuffle"), "order of tasks", "sequential")
    thinking = ROLLOUT + "enable_thinking" if source.has(ROLLOUT + "enable_thinking") else "model.enable_thinking"
    return {
        "data.train": taskset.files("path"),
        "data.val": sets or None,
        **FIELDS["columns"](taskset),
        "data.shuffle": selector == "shuffle",
        # Until 2026-02 the default was false, which the chat templates of thinking models read.
        "data.chat_template_kwargs": None if source.value(thinking) is None else {"enable_thinking": source.flag(thinking)},
        **_workflow(source),
        **(_experts(source) if mixes(source) else {}),
    }


def _experts(source: Source) -> dict[str, Any]:
    """Return the keys of the data set with the expert's responses; it must have the same prompt column as the taskset."""
    columns = source.under(EXPERTS + "format.")
    if (columns.text("prompt_type") or "messages") == "messages":
        return FIELDS["expert_messages"](source)
    if (columns.text("prompt_key") or "prompt") != source.text(TASKSET + "format.prompt_key"):
        columns.lacks("prompt_key", "a column of prompts that is not the tasks' column")
    return FIELDS["expert_responses"](source)


def _workflow(source: Source) -> dict[str, Any]:
    """Return our keys of a task's prompt and reward, from its workflow, its reward function and their arguments."""
    places = [source.under(TASKSET), source.under("buffer.explorer_input.")]
    flow, reward = (
        next((name for place in places if (name := place.text(key))), "")
        for key in ("default_workflow_type", "default_reward_fn_type")
    )
    if flow not in ("", *_WORKFLOWS):
        places[1].lacks("default_workflow_type", f"the workflow {flow}: known here are a prompt, its responses and a reward")
        return {}
    if reward and reward not in _REWARDS:
        places[1].lacks("default_reward_fn_type", f"the reward {reward}: reward.functions names a function")
        return {}
    arguments, is_boxed = source.under(TASKSET + "workflow_args."), flow == "math_boxed_workflow"
    known = ("use_base", "with_think", "format_score_coef") if is_boxed else ()
    for key in source.keys(TASKSET + "workflow_args."):
        if key.removeprefix(TASKSET + "workflow_args.") not in known:
            source.lacks(key, f"an argument of {flow or 'the workflow'}")
    with_think = is_boxed and arguments.flag("with_think")
    # The text as it was written: a line break at its end is part of the prompt.
    system = places[0].raw("format.system_prompt") or places[1].raw("system_prompt") or None
    ours: dict[str, Any] = {}
    if is_boxed:
        system = system or (_PROMPTS["think" if with_think else "boxed"])
        reward = reward or "math_boxed_reward"
        ours["data.chat_template"] = _PROMPTS["base"] if arguments.flag("use_base") else None
    elif flow in ("math_workflow", "async_math_workflow"):
        reward = reward or "math_reward"
        if not system and reward == "math_reward":
            system = _PROMPTS["r1"]
    rewards = dict(_REWARDS.get(reward, {}))
    if with_think and reward == "math_boxed_reward":
        rewards["think"] = arguments.number("format_score_coef") or 0.1
    ours |= {"data.system_prompt": system, "reward.functions": rewards or None}
    return ours | _reward_arguments(source, reward)


def _reward_arguments(source: Source, reward: str) -> dict[str, Any]:
    """Return DAPO's penalty for long responses, from the arguments of the reward function; other arguments are refused."""
    arguments = source.under(TASKSET + "reward_fn_args.")
    known = ("enable_overlong_penalty", "penalty_factor", "max_response_length", "cache_length")
    for key in source.keys(TASKSET + "reward_fn_args."):
        if reward != "math_dapo_reward" or key.removeprefix(TASKSET + "reward_fn_args.") not in known:
            source.lacks(key, f"an argument of {reward or 'the reward'}")
    if reward != "math_dapo_reward" or not arguments.flag("enable_overlong_penalty"):
        return {}
    if arguments.whole("max_response_length") != response_tokens(source):
        arguments.lacks("max_response_length", "a length penalty that ends at another length than model.max_response_tokens")
    return FIELDS["overlong"](arguments)


def sampled_evaluation(source: Source) -> dict[str, Any]:
    """Return our sampling keys of evaluation; a set without its own values is sampled as in training."""
    key = EVALUATED
    usual = {f"rollout_args.{name}": source.number(f"model.{name}") for name in ("temperature", "top_p")}
    ways = []
    for entry in source.items(key):
        data_set = Source(dict(flatten(entry)) if isinstance(entry, dict) else {}, usual, source.environment)
        drawn = (data_set.number(f"rollout_args.{name}") for name in ("temperature", "top_p"))
        times = data_set.whole("repeat_times") or data_set.whole("rollout_args.n") or 1
        ways.append((*drawn, times))
    if len(set(ways)) > 1:
        source.lacks(key, "evaluation sets with different sampling: all are sampled as the first one", changes_result=False)
    temperature, top_p, repeats = ways[0]
    if not temperature:
        return {"eval.samples": 0}
    return {"eval.samples": repeats, "eval.temperature": temperature, "eval.top_p": top_p}
