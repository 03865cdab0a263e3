"""Translate TRL's GRPO: rollouts and updates, loss, correction, rewards, sampling and engine (grpo_trainer.py)."""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import choices
from fivefold_dialects.translator import our_defaults

CHOICES = choices("trl")
PROFILES = {"single_gpu": 1, **dict.fromkeys(("fsdp1", "fsdp2", "multi_gpu", "zero1", "zero2", "zero3"), 8)}
"""TRL's own configurations of accelerate -> their number of processes."""
LONGEST_PROMPT = 2048
"""Longest prompt in tokens, which TRL does not limit: a run with longer prompts does not start."""
NO_BOUND = 1.0e9
"""Upper bound that no weight reaches: a ratio is at most e^20."""
OVERLONG = (1280, 256)
"""Longest response and buffer of get_soft_overlong_punishment in TRL's program."""
DEVIATION = "TRL divides advantages by the deviation + 1e-4, here + 1e-6: they are larger by 1e-4 / deviation"
SERVERS = "servers of vllm_mode=server must be fivefold's own: docs/engines.md shows how to start them"
REWARDS = {
    "accuracy_reward": ("math", "the last answer of a response counts, in TRL the first formula that it finds"),
    "think_format_reward": ("think", "<think> may stand after other text, and 0 and -1 stand for TRL's 1 and 0"),
}
"""TRL's rewards -> our reward, and the difference between the two."""
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_OTHERS = ("top_k", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "logit_bias")


def processes(source: Source) -> int:
    """Return the number of processes that train, each with one GPU."""
    profile, count = source.text("accelerate_config") or "", source.whole("num_processes")
    if count is None:
        count = source.whole("accelerate.num_processes")
    if count is None and profile not in ("", *PROFILES):
        raise UnreadableError(
            f"accelerate_config must be a file with num_processes or one of {', '.join(PROFILES)}: got {profile}"
        )
    return PROFILES.get(profile, 8) if count is None else count


def at_once(source: Source) -> int:
    """Return the number of responses (or rows) in one micro-batch of all processes together."""
    return source.count("per_device_train_batch_size") * processes(source)


def micro_steps(source: Source) -> int:
    """Return the number of micro-batches in one rollout."""
    whole, steps, together = source.whole("generation_batch_size"), source.whole("steps_per_generation"), at_once(source)
    if whole is None:
        return steps or source.count("gradient_accumulation_steps")
    if steps is not None:
        raise UnreadableError("only one of generation_batch_size and steps_per_generation can be set: remove one of them")
    if whole < 1 or together < 1 or whole % together:
        raise UnreadableError(f"generation_batch_size = {whole} must be a multiple of the {together} responses of a batch")
    return whole // together


def updates_of(source: Source) -> int:
    """Return the optimizer steps of one pass over a rollout; 1 if the numbers do not divide, which `batch` refuses."""
    return max(1, micro_steps(source) // max(1, source.count("gradient_accumulation_steps")))


def batch(source: Source) -> dict[str, Any]:
    accumulated, group = source.count("gradient_accumulation_steps"), source.count("num_generations")
    steps, parts = micro_steps(source), updates_of(source)
    prompts, rest = divmod(at_once(source) * steps, max(1, group))
    if group < 2 or prompts < 1 or rest or accumulated < 1:
        raise UnreadableError(
            f"a rollout of {at_once(source)} x {steps} = {at_once(source) * steps} responses (per_device_train_batch_size x "
            f"processes x steps_per_generation) must be whole groups of num_generations = {group}, of at least 2"
        )
    if steps % accumulated or prompts % parts:
        key = "generation_batch_size" if source.has("generation_batch_size") else "steps_per_generation"
        source.lacks(
            key, f"a rollout of {steps} batches, {prompts} prompts, not divisible into updates of {accumulated} batches"
        )
    return {"data.prompts_per_step": prompts, "algorithm.updates_per_step": parts}


def one_by_one(source: Source) -> str | None:
    """Return our name of a mean over micro-batches; None if it depends on which responses a micro-batch has."""
    if source.count("per_device_train_batch_size") == 1:
        return "seq-mean-token-mean"
    return "token-mean" if processes(source) * source.count("gradient_accumulation_steps") == 1 else None


def aggregate(source: Source) -> str | None:
    """Return our name of the mean of the loss and its KL; None if we have no such mean."""
    mean: str | None = CHOICES["loss_type"].read(source).get("aggregate")
    return one_by_one(source) if mean == "micro-batch-token-mean" else mean


def loss(source: Source) -> dict[str, Any]:
    ours, mean = dict(CHOICES["loss_type"].read(source)), aggregate(source)
    ours |= {
        "aggregate": mean,
        "normalize": CHOICES["scale_rewards"].read(source),
        "importance_sampling_level": source.text("importance_sampling_level"),
        "overlong_filter": source.flag("mask_truncated_completions"),
    }
    if ours["normalize"] != "none":
        source.note(DEVIATION)
    name, parts = source.text("loss_type"), updates_of(source)
    if name == "bnpo" and mean is None:
        source.lacks("loss_type", "a mean over micro-batches of several responses, which differ here: use dapo")
    if name in ("dapo", "cispo") and parts > 1:
        source.lacks("loss_type", f"{parts} updates of a rollout, each divided by the tokens of all: use one, or grpo")
    if ours["overlong_filter"] and mean != "token-mean":
        source.lacks("mask_truncated_completions", "truncated responses that count in the denominator: use dapo")
    return {f"algorithm.{key}": value for key, value in (ours | bounds(source, ours.get("surrogate"))).items()}


def bounds(source: Source, surrogate: str | None) -> dict[str, Any]:
    high = source.number("epsilon_high" if source.number("epsilon_high") is not None else "epsilon") or 0.0
    if surrogate == "cispo":
        if high < 1:
            source.lacks("epsilon_high", f"cispo with weights of at most epsilon_high = {high:g}: use 1 or more")
        return {"clip_high": max(0.0, high - 1)}
    if surrogate != "ppo_clip":
        return {}
    delta = source.number("delta")
    if delta is not None and delta <= 1 + high:
        source.lacks("delta", f"a bound of {delta:g} that is not above 1 + epsilon_high = {1 + high:g}")
    return {"clip_high": high, "dual_clip": delta}


def penalties(source: Source) -> dict[str, Any]:
    """Return our keys of the KL, which is averaged as the loss is, and of the entropy, averaged over micro-batches."""
    coef, entropy = source.number("beta") or 0.0, source.number("entropy_coef") or 0.0
    ours: dict[str, Any] = {"kl.coef": coef, "entropy_coef": entropy}
    if coef:
        ours |= {"kl.estimator": "k3", "kl.ratio_weighted": source.flag("use_bias_correction_kl")}
    if entropy:
        mean = ours["penalty_aggregate"] = one_by_one(source)
        if mean is None or (coef and mean != aggregate(source)) or source.flag("mask_truncated_completions"):
            source.lacks("entropy_coef", "an entropy that is averaged over each micro-batch of several responses")
    return {f"algorithm.{key}": value for key, value in ours.items()}


def correction(source: Source) -> dict[str, Any]:
    section = source.under("vllm_importance_sampling_")
    if not source.flag("use_vllm") or not section.flag("correction"):
        return {}
    high = section.number("cap") if section.number("cap") is not None else section.number("clip_max")
    ours = dict(CHOICES["vllm_importance_sampling_mode"].read(source))
    ours |= {"low": section.number("clip_min") or 0.0, "high": NO_BOUND if high is None else high}
    return {f"algorithm.rollout_correction.{key}": value for key, value in ours.items()}


def rewards(source: Source) -> dict[str, Any]:
    names, model = source.texts("reward_funcs"), source.path("reward_model_name_or_path")
    count = len(names) + bool(model)
    weights = source.numbers("reward_weights") or [1.0] * count
    if len(weights) != count:
        raise UnreadableError(f"reward_weights must be one for each reward: got {len(weights)} for {count}")
    if not count:
        source.lacks("reward_funcs", "rewards that only the program's code names: set --reward_funcs rewards.exact")
    values: dict[str, Any] = {"reward.model.path": model, "reward.model.weight": weights.pop(0)} if model else {}
    functions: dict[str, float] = {}
    for name, weight in zip(names, weights, strict=True):
        if name in REWARDS:
            ours, differs = REWARDS[name]
            functions[ours] = weight
            source.note(f"{name} is `{ours}` here: {differs}")
        elif "." in name:
            module, _, function = name.rpartition(".")
            functions[f"{module.replace('.', '/')}.py:{function}"] = weight
        elif name == "get_soft_overlong_punishment" and source.whole("max_completion_length") == OVERLONG[0]:
            values |= {"algorithm.overlong_buffer": OVERLONG[1], "algorithm.overlong_penalty": weight}
        else:
            source.lacks("reward_funcs", f"{name}: known here are {', '.join(REWARDS)}, and package.module.function")
    if "accuracy_reward" in names:
        values["data.ground_truth_key"] = "solution"
    return values | {"reward.functions": functions or None}


def sampling(source: Source) -> dict[str, Any]:
    response, longest = source.count("max_completion_length"), source.whole("vllm_max_model_length")
    prompt = source.whole("max_prompt_length") or (longest - response if longest else LONGEST_PROMPT)
    template = source.under("chat_template_kwargs.")
    values: dict[str, Any] = {
        "data.max_prompt_tokens": prompt,
        "data.overlong_prompts": "refuse",
        "data.max_response_tokens": response,
        "data.chat_template_kwargs": {name: template.value(name) for name in template.keys("")} or None,
        "policy.tokens_per_micro_batch": max(our_defaults()["policy.tokens_per_micro_batch"], prompt + response),
    }
    arguments = source.under("generation_kwargs.")
    for name in arguments.keys(""):
        ours = {"min_new_tokens": "min_tokens"}.get(name, name)
        if ours not in (*_NUMBERS, *_OTHERS):
            arguments.lacks(name, f"an argument of sampling: known here are {', '.join((*_NUMBERS, *_OTHERS))}")
        else:
            read = arguments.number if ours in _NUMBERS else arguments.texts if ours == "stop" else arguments.value
            values[f"engine.sampling.{ours}"] = read(name)
    return values


def engine(source: Source) -> dict[str, Any]:
    if not source.flag("use_vllm"):
        return {"engine.backend": "transformers"}
    mode, length = source.text("vllm_mode"), {"engine.max_model_len": source.whole("vllm_max_model_length")}
    if mode == "server":
        source.note(SERVERS)
        host, port = source.text("vllm_server_host"), source.whole("vllm_server_port")
        return length | {
            "engine.backend": "vllm",
            "engine.url": [source.text("vllm_server_base_url") or f"http://{host}:{port}"],
        }
    if mode != "colocate":
        source.lacks("vllm_mode", f"the mode {mode}: known here are colocate and server")
    return length | {
        "engine.backend": shared.engine_layout(processes(source), source.count("vllm_tensor_parallel_size")),
        "engine.memory_fraction": source.number("vllm_gpu_memory_utilization"),
        "engine.sleep": source.flag("vllm_enable_sleep_mode"),
    }


DERIVED = (batch, loss, penalties, correction, sampling, rewards, engine)
