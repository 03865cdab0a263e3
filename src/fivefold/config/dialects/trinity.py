"""Trinity-RFT: YAML, `trinity run --config FILE`; an explorer that samples and a trainer (verl's) on GPUs of their own.

trinity_rows.py has what becomes of each key, trinity_algorithm.py what several of them say of the method; here is the rest.
Numbers that only Trinity's code explains were read in Trinity-RFT 221b0759 and 9051d637; a note has the place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.config.dialects import Translation, Tree, merged, shared
from fivefold.config.dialects.adapters import adapters
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.source import Source, UnreadableError, flatten
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect
from fivefold.config.dialects.trinity_algorithm import (
    ADVANTAGES,
    ALGORITHMS,
    algorithm,
    chosen,
    expert_batch,
    kind,
    kl,
    loss,
    mixes,
    offline,
)
from fivefold.config.dialects.trinity_rows import ACTOR, BUFFER, CRITIC, EXPERTS, ROLLOUT, SECTIONS, TASKSET, VERL
from fivefold.config.loader import read

DEFAULTS: dict[str, Any] = {
    "mode": "both",
    "project": "Trinity-RFT",
    "name": "rft",
    "checkpoint_root_dir": "./checkpoints",
    "continue_from_checkpoint": True,
    "algorithm.algorithm_type": "ppo",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.optimizer.lr": 1e-6,
    "algorithm.optimizer.lr_warmup_steps": -1,
    "algorithm.optimizer.lr_warmup_steps_ratio": 0.0,
    "algorithm.optimizer.min_lr_ratio": 0.01,
    "algorithm.optimizer.lr_scheduler_type": "constant",
    "algorithm.optimizer.betas": [0.9, 0.999],
    "algorithm.optimizer.weight_decay": 0.01,
    "model.temperature": 1.0,
    "model.top_p": 1.0,
    "model.top_k": -1,
    "cluster.node_num": 1,
    "cluster.gpu_per_node": 1,
    "buffer.batch_size": 1,
    "buffer.train_batch_size": 0,
    "buffer.total_epochs": 1,
    TASKSET + "format.prompt_key": "prompt",
    "explorer.eval_interval": 100,
    "explorer.eval_on_startup": True,
    ROLLOUT + "engine_num": 1,
    ROLLOUT + "tensor_parallel_size": 1,
    ROLLOUT + "gpu_memory_utilization": 0.9,
    "synchronizer.sync_interval": 1,
    "synchronizer.sync_offset": 0,
    "synchronizer.sync_style": "fixed",
    "trainer.save_interval": 0,
    "trainer.grad_clip": 1.0,
    "trainer.use_dynamic_bsz": True,
    "trainer.ulysses_sequence_parallel_size": 1,
    "trainer.trainer_strategy": "fsdp",
    "monitor.monitor_type": "tensorboard",
    ACTOR + "megatron.sequence_parallel": True,
    ACTOR + "ppo_micro_batch_size_per_gpu": 4,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    CRITIC + "cliprange_value": 0.5,
    CRITIC + "optim.lr": 1e-5,
}


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


HALVES = "explore and train"
"""The mode of two files that are one run."""


def join(trees: list[Tree]) -> Tree:
    """Two files of which one explores and one trains are the run that `mode: both` makes of them, on the GPUs of both.

    With sync_style fixed the explorer waits for new weights after each sync_interval of its steps (explorer.py,
    _pull_latest_weights) and the trainer for its samples, so neither has a pace of its own. The explorer's section is that
    of its file, the trainer's and the cluster (the trainer's GPUs) those of the other; what both say they must say alike.
    """
    modes = {str(tree.get("mode")): tree for tree in trees}
    if len(trees) != 2 or set(modes) != {"explore", "train"}:
        return merged(trees)
    explorer, trainer = modes["explore"], modes["train"]
    own = ("mode", "explorer", "cluster", "trainer", "monitor", "log", "service", "ignore_validator_suggestions")
    shared_parts = [{key: value for key, value in each.items() if key not in own} for each in (explorer, trainer)]
    said, also = (dict(flatten(part)) for part in shared_parts)
    if differing := sorted(key for key in said.keys() & also.keys() if said[key] != also[key]):
        first = differing[0]
        raise ValueError(
            f"the files of explorer and trainer must say the same of {', '.join(differing)}: "
            f"got {first}={said[first]} and {also[first]}"
        )
    of_trainer = {key: trainer[key] for key in own if key in trainer}
    return {**merged(shared_parts), **of_trainer, "explorer": explorer.get("explorer", {}), "mode": HALVES}


def program(source: Source) -> dict[str, Any]:
    mode = source.text("mode") or "both"
    if mode not in ("both", HALVES, "train") or (mode == "train" and not offline(source)):
        reason = "half of a run of two programs: give the other's file too" if mode in ("explore", "train") else mode
        source.lacks("mode", f"{reason}; a run samples and trains here (both), or learns from data (train with dpo or sft)")
    if source.text("trainer.trainer_config_path"):
        source.lacks("trainer.trainer_config_path", "settings in a second file: write them under trainer.trainer_config")
    return {}


def period(source: Source) -> int:
    """Trainer's steps that one step of ours has: those between two syncs, whose samples are all of the same weights."""
    return 1 if offline(source) else max(1, source.whole("synchronizer.sync_interval") or 1)


def periods(source: Source, steps: int | None) -> int:
    """Steps of ours that so many of the trainer's make, rounded up."""
    return -(-max(0, steps or 0) // period(source))


def ahead(source: Source) -> dict[str, Any]:
    """The explorer's step s has the weights of trainer's step max(0, (s - offset - 1) // interval) x interval (explorer.py,
    need_sync), so that an offset counts steps of ours, or a part of one, by its intervals."""
    if offline(source):
        return {}
    said = source.under("synchronizer.")
    interval, offset = period(source), said.whole("sync_offset") or 0
    if (style := said.text("sync_style") or "fixed") != "fixed":
        said.lacks(
            "sync_style", f"{style}: weights that come when one of the two asks, so that no step says how old a sample is"
        )
    if interval > 1:
        found = {**ADVANTAGES.get(chosen(source, "advantage", "advantage_fn"), {})}
        over_batch = found.get("whiten") or source.text("algorithm.advantage_fn_args.std_cal_level") == "batch"
        section = "kl_penalty_fn_args" if (source.text("algorithm.kl_penalty_fn") or "none") != "none" else "kl_loss_fn_args"
        reasons = (
            (over_batch and found.get("credit") != "gae", "advantages over the samples of each of the trainer's steps"),
            (source.flag(f"algorithm.{section}.adaptive"), "a KL coefficient that moves in each of the trainer's steps"),
        )
        for is_asked, reason in reasons:
            if is_asked:
                said.lacks("sync_interval", f"{reason}, where {interval} of them are one step here: say 1")
    return shared.ahead(offset / interval, "finish")


_PRIORITIES = ("linear_decay", "decay_limit_randomization")


def replayed(source: Source) -> dict[str, Any]:
    """A queue with priorities: the newest weights' samples come first, and come again after `reuse_cooldown_time`."""
    said = source.under(BUFFER)
    enabled = next((key for key in ("replay_buffer.enable", "use_priority_queue") if said.flag(key)), None)
    if enabled is None or offline(source):
        return {}
    new = said.under("replay_buffer.")
    old = enabled == "use_priority_queue"
    place, arguments = (said, said.under("replay_buffer_kwargs.")) if old else (new, new.under("priority_fn_args."))
    priority = (arguments if old else new).text("priority_fn") or _PRIORITIES[0]
    capacity = said.whole("capacity")
    reasons = (
        (place.value("reuse_cooldown_time") is not None, "samples that are learned from again after so many seconds"),
        (priority not in _PRIORITIES, f"the priority {priority}: known here are {', '.join(_PRIORITIES)}"),
        (arguments.number("sigma"), "priorities with noise"),
        (
            source.whole("synchronizer.sync_offset"),
            "the newest samples first, where a sync_offset leaves older ones waiting",
        ),
        (capacity and capacity < source.count("buffer.batch_size") * period(source), "a queue that drops samples"),
    )
    for is_asked, reason in reasons:
        if is_asked:
            said.lacks(enabled, reason)
    return {}


def layout(source: Source) -> dict[str, Any]:
    world = gpus(source)
    if not is_megatron(source):
        cp = max(
            source.whole("trainer.ulysses_sequence_parallel_size") or 1,
            source.whole(ACTOR + "ulysses_sequence_parallel_size") or 1,
        )
        return {"policy.backend": str(shared.world_layout(world, cp=cp)), "policy.recompute": "full"}
    said = source.under(ACTOR + "megatron.")
    found: dict[str, Any] = {
        "policy.backend": str(shared.world_layout(world, **shared.parallel_sizes(said))),
        "policy.sequence_parallel": said.flag("sequence_parallel"),
    }
    if (virtual := said.whole("virtual_pipeline_model_parallel_size") or 1) > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    start = ACTOR + "megatron.override_transformer_config"
    return found | shared.recompute(source, start, "policy") | shared.megatron_options(source, start, "policy.megatron")


def offload(source: Source) -> dict[str, Any]:
    where = "megatron" if is_megatron(source) else "fsdp_config"
    parts = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}
    return {f"policy.offload.{part}": True for part, name in parts.items() if source.flag(f"{ACTOR}{where}.{name}_offload")}


def response_tokens(source: Source) -> int:
    """What prompts leave of model.max_model_len where it is not said, or half of it (config_validator.py:555)."""
    said, whole = source.whole("model.max_response_tokens"), source.whole("model.max_model_len")
    if said is not None or whole is None:
        return source.count("model.max_response_tokens")
    prompt = source.whole("model.max_prompt_tokens")
    return whole - (whole // 2 if prompt is None else min(prompt, whole - 1))


def lengths(source: Source) -> dict[str, Any]:
    response = response_tokens(source)
    prompt, whole = source.whole("model.max_prompt_tokens"), source.whole("model.max_model_len")
    if prompt is None:
        prompt = whole - response if whole is not None else None
    if prompt is None or prompt < 1:
        raise UnreadableError("model.max_prompt_tokens or model.max_model_len must say how long prompts may be")
    longest = (prompt + response) * (2 if kind(source) == "dpo" else 1)
    if (
        source.flag(ACTOR + "use_dynamic_bsz")
        if source.has(ACTOR + "use_dynamic_bsz")
        else source.flag("trainer.use_dynamic_bsz")
    ):
        tokens = source.whole("trainer.max_token_len_per_gpu") or source.count(ACTOR + "ppo_max_token_len_per_gpu")
        tokens *= source.whole("trainer.ulysses_sequence_parallel_size") or 1
    else:
        tokens = source.count(ACTOR + "ppo_micro_batch_size_per_gpu") * (prompt + response)
    return {
        "data.max_prompt_tokens": prompt,
        "data.max_response_tokens": response,
        "policy.tokens_per_micro_batch": max(tokens, longest),
        "data.overlong_prompts": "refuse",
    }


def batch(source: Source) -> dict[str, Any]:
    tasks, taken = source.count("buffer.batch_size"), source.whole("buffer.train_batch_size") or 0
    if offline(source):
        return {"data.prompts_per_step": taken or tasks}
    group = source.whole("algorithm.repeat_times") or int(ALGORITHMS.get(kind(source), {}).get("repeat", 1))
    steps, experts = period(source), expert_batch(source) if mixes(source) else 0
    if (taken or experts or mixes(source)) and taken != tasks * group + experts:
        source.lacks(
            "buffer.train_batch_size",
            f"a trainer's step of {taken} samples beside an explorer's of {tasks} x {group}"
            f"{f' and {experts} of an expert' if experts else ''}: they must be as many",
        )
    with_critic = chosen(source, "advantage", "advantage_fn") == "ppo"
    return {
        "data.prompts_per_step": tasks * steps,
        "data.expert_per_step": experts * steps or None,
        "algorithm.group_size": group,
        "algorithm.updates_per_step": steps,
        "algorithm.values_per": "update" if with_critic and steps > 1 else None,
    }


def optimizer(source: Source) -> dict[str, Any]:
    """algorithm.optimizer, or verl's keys where those are set instead."""
    new, old = source.under("algorithm.optimizer."), source.under(ACTOR + "optim.")

    def of(key: str) -> Source:
        return old if old.has(key) and not new.has(key) else new

    lr = of("lr").number("lr")
    style = (
        (old.text("warmup_style") if old.has("warmup_style") else None)
        or of("lr_scheduler_type").text("lr_scheduler_type")
        or "constant"
    )
    if style not in ("constant", "cosine"):
        new.lacks("lr_scheduler_type", f"the schedule {style}")
        style = "constant"
    steps, share = (
        of("lr_warmup_steps").whole("lr_warmup_steps"),
        of("lr_warmup_steps_ratio").number("lr_warmup_steps_ratio"),
    )
    found: dict[str, Any] = {
        "lr": lr,
        "weight_decay": of("weight_decay").number("weight_decay"),
        "betas": [float(beta) for beta in of("betas").items("betas")],
        "clip_grad": source.number("trainer.actor_grad_clip") or source.number("trainer.grad_clip"),
        "schedule": style,
        "schedule_per": "step" if period(source) == 1 else "update",
        "warmup_from": 0,
        "warmup_steps": steps if steps is not None and steps >= 0 else share or 0,
    }
    if style != "constant":
        found["min_lr"] = (of("min_lr_ratio").number("min_lr_ratio") or 0.0) * (lr or 0.0)
    if is_megatron(source):
        found["betas"] = [0.9, 0.999]
    return {f"policy.optimizer.{key}": value for key, value in found.items()}


def critic(source: Source) -> dict[str, Any]:
    if chosen(source, "advantage", "advantage_fn") != "ppo" or offline(source):
        return {}
    found: dict[str, Any] = {
        "critic.value_clip": source.number(CRITIC + "cliprange_value"),
        "critic.optimizer.lr": source.number(CRITIC + "optim.lr"),
        "critic.optimizer.schedule_per": "step" if period(source) == 1 else "update",
        "critic.optimizer.warmup_from": 0,
    }
    if path := source.text("model.critic_model_path"):
        found["critic.path"] = path
    if budget := source.whole(CRITIC + "ppo_max_token_len_per_gpu"):
        found["critic.tokens_per_micro_batch"] = max(
            budget, lengths(source)["data.max_prompt_tokens"] + response_tokens(source)
        )
    if (warmup := source.whole(VERL + "trainer.critic_warmup") or 0) > 1:
        if (warmup - 1) % period(source):
            source.lacks(VERL + "trainer.critic_warmup", "a critic that learns alone until between two syncs")
        found["critic.warmup_steps"] = periods(source, warmup - 1)
    return found


def engine(source: Source) -> dict[str, Any]:
    if offline(source):
        return {}
    said, drawn = source.under(ROLLOUT), source.under(TASKSET + "rollout_args.")
    tp = said.count("tensor_parallel_size")
    found: dict[str, Any] = {
        **shared.engine_apart(said.count("engine_num") * tp, tp),
        "engine.memory_fraction": said.number("gpu_memory_utilization"),
        "engine.sampling.temperature": drawn.number("temperature")
        if drawn.has("temperature")
        else source.number("model.temperature"),
        "engine.sampling.top_p": drawn.number("top_p") if drawn.has("top_p") else source.number("model.top_p"),
        "engine.sampling.top_k": max(0, (drawn.whole("top_k") if drawn.has("top_k") else source.whole("model.top_k")) or 0),
    }
    for name in ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill"):
        if said.has(name):
            found[f"engine.vllm.{name}"] = said.flag(name)
    return found


_WORKFLOWS = ("math_workflow", "async_math_workflow", "math_boxed_workflow", "default", "simple_workflow")
_REWARDS = {
    "math_reward": {"math": 1.0, "think_answer": 0.1},
    "math_boxed_reward": {"math": 1.0},
    "accuracy_reward": {"math": 1.0},
    "math_dapo_reward": {"math": 1.0},
    "countdown_reward": {"countdown": 1.0},
}
_R1_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first "
    "thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and "
    "answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,\n"
    "<think> reasoning process here </think>\n<answer> answer here </answer>.\n"
)
"""DeepSeek-R1's (2501.12948 table 1), which math_workflow puts before prompts that have none (workflow.py)."""
_BOXED_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
_THINK_PROMPT = (
    "You are a helpful assistant that solves MATH problems. You should first thinks about the reasoning process in mind and "
    "then provides the user with the answer. You should present your reasoning process using the format: <think>\n "
    "...your reasoning process here... </think>\n first. You should always include your final answer in \\boxed{} as "
    "closed-form results."
)
"""math_boxed_workflow's, without and with with_think (customized_math_workflows.py)."""
_BASE_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ 'System:' + message.content + '\\n' }}"
    "{% elif message.role == 'user' %}{{ 'User:\\n' + message.content + '\\nAssistant:\\n' }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
"""Its prompt with use_base, for models that know no chat."""


def data(source: Source) -> dict[str, Any]:
    if offline(source):
        said = source.under(BUFFER + "format.")
        found: dict[str, Any] = {"data.train": shared.files(source, BUFFER + "path")}
        for theirs, ours in (
            ("prompt_key", "prompt_key"),
            ("response_key", "response_key"),
            ("messages_key", "messages_key"),
            ("chosen_key", "chosen_key"),
            ("rejected_key", "rejected_key"),
        ):
            if said.has(theirs):
                found[f"data.{ours}"] = said.text(theirs)
        return found
    found = {
        "data.train": shared.files(source, TASKSET + "path"),
        "data.prompt_key": source.text(TASKSET + "format.prompt_key"),
    }
    if truth := source.text(TASKSET + "format.response_key"):
        found["data.ground_truth_key"] = truth
    sets = [each.get("path") for each in source.items("buffer.explorer_input.eval_tasksets") if isinstance(each, dict)]
    if sets:
        found["data.val"] = [str(path) for path in sets]
    found |= _workflow(source)
    if mixes(source):
        found |= _experts(source)
    selector = source.text(TASKSET + "data_selector.selector_type") or "sequential"
    if selector not in ("sequential", "shuffle"):
        source.lacks(TASKSET + "data_selector.selector_type", f"tasks that are chosen in another way: {selector}")
    found["data.shuffle"] = selector == "shuffle"
    thinking = next((key for key in (ROLLOUT + "enable_thinking", "model.enable_thinking") if source.has(key)), None)
    if thinking is not None and source.value(thinking) is not None:
        found["data.chat_template_kwargs"] = {"enable_thinking": source.flag(thinking)}
    return found


def _experts(source: Source) -> dict[str, Any]:
    """The data set of an expert's responses, of which the taskset's prompts have the same column."""
    said = source.under(EXPERTS + "format.")
    found: dict[str, Any] = {"data.expert": shared.files(source, EXPERTS + "path")}
    if (said.text("prompt_type") or "messages") == "messages":
        return found | {"data.messages_key": said.text("messages_key") or "message"}
    if (said.text("prompt_key") or "prompt") != source.text(TASKSET + "format.prompt_key"):
        said.lacks("prompt_key", "another column with prompts than that of the tasks")
    return found | {"data.response_key": said.text("response_key") or "response"}


def _workflow(source: Source) -> dict[str, Any]:
    """How a task is asked and scored: its workflow, the reward function, and the arguments of both."""
    places = [source.under(TASKSET), source.under("buffer.explorer_input.")]
    flow, reward = (
        next((name for place in places if (name := place.text(key))), "")
        for key in ("default_workflow_type", "default_reward_fn_type")
    )
    if flow not in ("", *_WORKFLOWS):
        places[1].lacks(
            "default_workflow_type", f"the workflow {flow}: a prompt, its responses and a reward function are what there is"
        )
        return {}
    if reward and reward not in _REWARDS:
        places[1].lacks("default_reward_fn_type", f"the reward {reward}: reward.functions names a function")
        return {}
    said, is_boxed = source.under(TASKSET + "workflow_args."), flow == "math_boxed_workflow"
    known = ("use_base", "with_think", "format_score_coef") if is_boxed else ()
    for key in source.keys(TASKSET + "workflow_args."):
        if key.removeprefix(TASKSET + "workflow_args.") not in known:
            source.lacks(key, f"an argument of {flow or 'the workflow'}")
    with_think = is_boxed and said.flag("with_think")
    # As it was written: a line break at its end is the model's to read.
    system = places[0].raw("format.system_prompt") or places[1].raw("system_prompt") or None
    found: dict[str, Any] = {}
    if is_boxed:
        system = system or (_THINK_PROMPT if with_think else _BOXED_PROMPT)
        reward = reward or "math_boxed_reward"
        found["data.chat_template"] = _BASE_TEMPLATE if said.flag("use_base") else None
    elif flow in ("math_workflow", "async_math_workflow"):
        reward = reward or "math_reward"
        if not system and reward == "math_reward":
            system = _R1_PROMPT
    rewards = dict(_REWARDS.get(reward, {}))
    if with_think and reward == "math_boxed_reward":
        rewards["think"] = said.number("format_score_coef") or 0.1
    found |= {"data.system_prompt": system, "reward.functions": rewards or None}
    return found | _reward_arguments(source, reward)


def _reward_arguments(source: Source, reward: str) -> dict[str, Any]:
    """DAPO's penalty of long responses, which is the only one among them."""
    said = source.under(TASKSET + "reward_fn_args.")
    known = ("enable_overlong_penalty", "penalty_factor", "max_response_length", "cache_length")
    for key in source.keys(TASKSET + "reward_fn_args."):
        if reward != "math_dapo_reward" or key.removeprefix(TASKSET + "reward_fn_args.") not in known:
            source.lacks(key, f"an argument of {reward or 'the reward'}")
    if reward != "math_dapo_reward" or not said.flag("enable_overlong_penalty"):
        return {}
    if said.whole("max_response_length") != response_tokens(source):
        said.lacks("max_response_length", "a penalty of lengths up to another one than model.max_response_tokens")
    return {
        "algorithm.overlong_buffer": said.count("cache_length"),
        "algorithm.overlong_penalty": said.number("penalty_factor"),
    }


def _sampled_evaluation(source: Source) -> dict[str, Any]:
    """How evaluation sets are sampled, `repeat_times` a task and as the model where they say nothing; the greedy response
    comes besides here."""
    key = "buffer.explorer_input.eval_tasksets"
    usual = (source.number("model.temperature"), source.number("model.top_p"))
    ways = []
    for each in source.items(key):
        own = Source(dict(flatten(each)) if isinstance(each, dict) else {}, {}, source.environment).under("rollout_args.")
        drawn = (
            own.number(name) if own.has(name) else other for name, other in zip(("temperature", "top_p"), usual, strict=True)
        )
        ways.append((*drawn, int((each.get("repeat_times") if isinstance(each, dict) else None) or 1)))
    if len(set(ways)) > 1:
        source.lacks(key, "sets that are sampled in different ways: all are as the first", changes_result=False)
    temperature, top_p, times = ways[0]
    return {"eval.samples": times if temperature else 0, "eval.temperature": temperature, "eval.top_p": top_p}


def run(source: Source) -> dict[str, Any]:
    place = "/".join(filter(None, (source.text("checkpoint_root_dir"), source.text("project"), source.text("name"))))
    keep = source.whole(VERL + "trainer.max_actor_ckpt_to_keep")
    key = "buffer.total_steps" if source.whole("buffer.total_steps") else "trainer.total_steps"
    steps = source.whole(key)
    if steps and steps % period(source):
        source.lacks(key, f"a run that ends between two syncs: say a multiple of sync_interval = {period(source)}")
    evaluated = bool(source.items("buffer.explorer_input.eval_tasksets")) and not offline(source)
    return {
        "trainer.run_dir": place,
        "trainer.keep": keep if keep and keep > 0 else EVERY_CHECKPOINT,
        "trainer.resume": "auto" if source.flag("continue_from_checkpoint") else "never",
        "trainer.save_every": periods(source, source.whole("trainer.save_interval")),
        "trainer.eval_every": periods(source, source.whole("explorer.eval_interval")) if evaluated else 0,
        "trainer.eval_before_train": source.flag("explorer.eval_on_startup") and evaluated,
        "trainer.steps": periods(source, steps) or None,
        "trainer.epochs": source.whole("buffer.total_epochs"),
        **(_sampled_evaluation(source) if evaluated else {"eval.samples": 0}),
        "trainer.loggers": [
            "console",
            *(name for name in shared.loggers(source, "monitor.monitor_type") if name != "console"),
        ],
    }


tracked = shared.tracked("monitor.monitor_type", "project", "name", group="group")


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


DERIVED = (
    program,
    low_rank,
    ahead,
    replayed,
    layout,
    offload,
    lengths,
    batch,
    algorithm,
    loss,
    kl,
    optimizer,
    critic,
    engine,
    data,
    run,
    tracked,
)

TABLE = Table(
    "Trinity-RFT",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    versions={"2025-09": {"cluster.gpu_per_node": 8}},
    command="`fivefold train --from trinity --config run.yaml`, as `trinity run --config run.yaml`.",
    loses=(
        "workflows with tools, environments and other models",
        "an explorer and a trainer that ask each other for weights (sync_style other than fixed)",
        "samples that are learned from again after some seconds, and operators on data",
    ),
    gains=(
        "no flash-attn, Apex or converter to install: mixture-of-experts models load from their Hugging Face directory",
        "a choice: GPUs of its own for sampling, or all GPUs for sampling and for training in turn",
        "every layout with the same numbers",
    ),
    known=known("trinity"),
)


def _of_today(tree: Tree) -> Tree:
    """Names of 2025 -> today's: the expert's data of mix, which was sft_warmup_dataset until 2025-10, and a token budget."""
    tree = copy.deepcopy(tree)
    trainer, buffer = tree.get("trainer"), tree.get("buffer")
    inputs = buffer.get("trainer_input") if isinstance(buffer, dict) else None
    mixes = str((tree.get("algorithm") or {}).get("algorithm_type")).startswith("mix")
    if mixes and isinstance(inputs, dict) and "sft_warmup_dataset" in inputs:
        inputs.setdefault("auxiliary_buffers", {})["sft_dataset"] = inputs.pop("sft_warmup_dataset")
    if isinstance(trainer, dict) and "ppo_max_token_len_per_gpu" in trainer:
        trainer.setdefault("max_token_len_per_gpu", trainer.pop("ppo_max_token_len_per_gpu"))
    return tree


def translate(
    tree: Tree, overrides: list[str], environment: Mapping[str, str] | None = None, version: str = ""
) -> Translation:
    """Trinity-RFT's configuration in our spelling, with the file of `trainer.trainer_config_path` where it is here."""
    trainer = tree.get("trainer")
    if isinstance(trainer, dict) and Path(str(trainer.get("trainer_config_path") or "")).is_file():
        inner = {**read(str(trainer["trainer_config_path"])), **(trainer.get("trainer_config") or {})}
        rest = {key: value for key, value in trainer.items() if key != "trainer_config_path"}
        tree = {**tree, "trainer": {**rest, "trainer_config": inner}}
    tree = _of_today(tree)
    return dialect(TABLE)(tree, overrides, environment, version)
