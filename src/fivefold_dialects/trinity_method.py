"""Translate Trinity-RFT's method and steps: the choices of an algorithm type, its loss, its KL and its batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.legacy import trinity as legacy
from fivefold_dialects.source import Source
from fivefold_dialects.table import Choice, choices
from fivefold_dialects.trinity_keys import ACTOR, BUFFER, kind, mixes, period, samples

CHOICES = choices("trinity")
TYPES = CHOICES["algorithm.algorithm_type"]
_LOSS = "algorithm.policy_loss_fn_args."


def chosen(source: Source, name: str) -> str:
    """Return the name of one of the algorithm's choices (advantage_fn, ...): its key's value, or the algorithm type's."""
    value = source.text(f"algorithm.{name}")
    if value is None and name == "advantage_fn":
        value = legacy.advantage(source, kind(source))
    return value or str(TYPES.names.get(kind(source), {}).get(name, "none"))


def choice(source: Source, name: str) -> Choice:
    return replace(CHOICES[f"algorithm.{name}"], default=chosen(source, name))


def uses_critic(source: Source) -> bool:
    return samples(source) and chosen(source, "advantage_fn") == "ppo"


def uses_reference(source: Source) -> bool:
    return kind(source) == "dpo" or any(value for key, value in kl(source).items() if key.endswith("coef"))


def group_size(source: Source) -> int:
    return source.whole("algorithm.repeat_times") or int(TYPES.names.get(kind(source), {}).get("repeat_times", 1))


def algorithm(source: Source) -> dict[str, Any]:
    name = TYPES.name(source)
    if name is None or name == "sft":
        return {"algorithm.name": name}
    arguments = source.under("algorithm.advantage_fn_args.")
    if name == "dpo":
        places = [key for key in (_LOSS + "beta", "algorithm.kl_loss_fn_args.kl_coef") if source.has(key)]
        beta = legacy.early(source).get("kl_loss_coef", source.number(places[0], 0.1) if places else 0.1)
        smoothing = source.number(_LOSS + "label_smoothing")
        return {"algorithm.name": "dpo", "algorithm.beta": beta, "algorithm.label_smoothing": smoothing}
    strategy = source.text("algorithm.sample_strategy")
    if strategy not in (None, "mix" if mixes(source) else "default", "warmup"):
        source.lacks("algorithm.sample_strategy", f"another choice of samples: {strategy}")
    advantage = choice(source, "advantage_fn")
    if advantage.name(source) is None:
        return {}
    ours = {"whiten": False, "credit": "response", **advantage.read(source)}
    if ours["name"] == "grpo" and arguments.text("std_cal_level") == "batch":
        ours["normalize"] = "batch"
    old, tau = legacy.opmd(source) or (arguments, 1.0)
    if ours["name"] == "opmd" and old.text("opmd_baseline") == "logavgexp":
        ours |= {"advantage": "log_mean_exp", "baseline_temperature": old.number("tau") if old.has("tau") else tau}
    if group_size(source) == 1 and ours["advantage"] in ("group", "leave_one_out", "log_mean_exp"):
        ours |= {"advantage": "reward", "normalize": "none", "baseline_shift": None, "baseline_temperature": None}
    return {f"algorithm.{key}": value for key, value in ours.items()}


def loss(source: Source) -> dict[str, Any]:
    if not samples(source) or kind(source) not in TYPES.names:
        return {}
    chosen_loss, arguments, early = choice(source, "policy_loss_fn"), source.under(_LOSS), legacy.early(source)
    name = chosen_loss.name(source)
    if name is None:
        return {}
    mean = source.text(_LOSS + ("grpo_loss_agg_mode" if mixes(source) else "loss_agg_mode"))
    mean = mean or source.text("algorithm.loss_agg_mode") or ("seq-mean-token-mean" if name == "gspo" else "token-mean")
    ours = {**chosen_loss.read(source), "aggregate": _mean(arguments, "loss_agg_mode", mean), "entropy_coef": 0.0}
    if chosen(source, "entropy_loss_fn") != "none":
        coef = source.number("algorithm.entropy_loss_fn_args.entropy_coef") or 0.0
        ours["entropy_coef"] = early.get("entropy_coef", coef)
    if name != "opmd":
        # The trainer uses the engine's log-probs of its samples (data conversion in verl_trainer).
        ours["rollout_correction.old_logprobs_from"] = "engine"
    if early:
        ours |= legacy.bounds(source, ours)
    if name == "sppo":
        ours["clip_low"] = 1 - 1 / (1 + (ours["clip_high"] or 0.0))
    if name == "rec":
        ours |= _rec(source, arguments)
    if name in ("mix", "mix_chord"):
        ours |= {f"expert.{key}": value for key, value in _expert(source, arguments, name).items()}
    return {f"algorithm.{key}": value for key, value in ours.items()}


def _mean(section: Source, key: str, name: str) -> str | None:
    if name not in shared.AGGREGATES:
        section.lacks(key, f"the mean {name}: known here are {', '.join(shared.AGGREGATES)}")
    return shared.AGGREGATES.get(name)


def expert_batch(source: Source) -> int:
    """Return the number of the expert's samples in one step of the trainer (mix_sample_strategy.py)."""
    share = source.number("algorithm.sample_strategy_args.expert_data_ratio") or 0.0
    return math.ceil(share * (source.whole("buffer.train_batch_size") or 0))


def _expert(source: Source, arguments: Source, name: str) -> dict[str, Any]:
    """Return our keys of the expert's loss in mix and mix_chord, with weight μ next to 1 - μ for the policy's own samples.
    Each of the two is a mean over its own samples if the loss gets the batch sizes of the run (mix_policy_loss.py,
    chord_policy_loss.py); μ changes with the trainer's steps."""
    mean = arguments.text("sft_loss_agg_mode")
    mean = mean or ("token-mean" if arguments.flag("use_token_level_loss_in_sft") else "seq-mean-token-mean")
    whole, of_expert = source.whole("buffer.train_batch_size") or 0, expert_batch(source)
    sizes = {"ppo_mini_batch_size": whole, "train_batch_size_usual": whole - of_expert, "train_batch_size_expert": of_expert}
    for key, holds in sizes.items():
        if arguments.whole(key) != holds:
            arguments.lacks(key, f"a loss scaled by another batch size than the run's: set it to {holds}")
    if not arguments.flag("use_dynamic_bsz"):
        arguments.lacks("use_dynamic_bsz", "a loss that is scaled by the number of GPUs: set it to true")
    ours: dict[str, Any] = {"aggregate": _mean(arguments, "sft_loss_agg_mode", mean), "token_weight": "none"}
    if name == "mix":
        return ours | {"weight": arguments.number("mu") or 0.0}
    warmup, decay = (int(arguments.number(key) or 0) for key in ("mu_warmup_steps", "mu_decay_steps"))
    peak, valley = (arguments.number(key) or 0.0 for key in ("mu_peak", "mu_valley"))
    if warmup and not decay and peak != valley:
        arguments.lacks("mu_decay_steps", "a share that drops at once after its warm-up: set it to 1 or more")
    return ours | {
        "weight": peak if decay or warmup else valley,
        "final_weight": valley if decay else None,
        "warmup_updates": warmup,
        "decay_updates": decay,
        "token_weight": "phi" if arguments.flag("enable_phi_function") else "none",
    }


def _rec(source: Source, arguments: Source) -> dict[str, Any]:
    """Return our keys for the mask, weight and regularizer of the loss rec (policy_loss_fn/rec_policy_loss.py)."""
    mode, weight, more = (arguments.text(key) or "none" for key in ("clip_mode", "weight", "regularizer"))
    by_sequence = mode == "gspo-one-side"
    ours: dict[str, Any] = {}
    if by_sequence:
        ours = {"importance_sampling_level": "sequence", "aggregate": "seq-mean-token-mean"}
    # We do not support a token's ratio with a sequence's mask, nor a sequence's ratio with a token's mask.
    ratio = "gspo_importance_sampling" if by_sequence else "importance_sampling"
    weights = {"none": "none", "advantage": "advantage", ratio: "ratio"}
    if weight not in weights:
        arguments.lacks("weight", f"the weight {weight} with clip_mode {mode}: known here are {', '.join(weights)}")
    coef = arguments.number("regularizer_coef") or 0.0
    if more not in ("none", "k2", "forward-kl") or (more == "k2" and coef and by_sequence):
        arguments.lacks("regularizer", f"the regularizer {more} with clip_mode {mode}")
    elif more != "none":
        ours["proximal_coef" if more == "k2" else "likelihood_coef"] = coef
    mask = CHOICES[_LOSS + "clip_mode"].read(source)
    return ours | {"clip_mode": mask, "token_weight": weights.get(weight)}


def kl(source: Source) -> dict[str, Any]:
    if not samples(source) or kind(source) not in TYPES.names:
        return {}
    loss, reward = (_penalty(source, name) for name in ("kl_loss_fn", "kl_penalty_fn"))
    if mixes(source) and (loss or reward):
        source.lacks("algorithm.kl_loss_fn", "a penalty that also counts the expert's tokens: set kl_coef to 0")
    return shared.penalties(source, loss, reward, "algorithm.kl_penalty_fn")


def _penalty(source: Source, section: str) -> dict[str, Any]:
    """Return the estimator and coefficient of one of the two KL penalties; empty if it is off."""
    name, arguments = chosen(source, section), source.under(f"algorithm.{section}_args.")
    coef, adaptive = arguments.number("kl_coef"), arguments.flag("adaptive")
    if old := legacy.penalty(source, section):
        name, coef, arguments, adaptive = old
    if name == "none" or not coef:
        return {}
    if name not in shared.ESTIMATORS:
        source.lacks(f"algorithm.{section}", f"the estimator {name}: known here are {', '.join(shared.ESTIMATORS)}")
        return {}
    ours: dict[str, Any] = {"estimator": shared.ESTIMATORS[name], "coef": coef}
    return ours | ({"target": arguments.number("target_kl"), "horizon": arguments.whole("horizon")} if adaptive else {})


def ahead(source: Source) -> dict[str, Any]:
    """Return our keys of sampling ahead: offset / interval of our steps, for the explorer's step s has the weights of the
    trainer's step max(0, (s - offset - 1) // interval) x interval (explorer.py, need_sync)."""
    synchronizer, interval = source.under("synchronizer."), period(source)
    if interval > 1:
        advantage = CHOICES["algorithm.advantage_fn"].names.get(chosen(source, "advantage_fn"), {})
        over_batch = advantage.get("whiten") or source.text("algorithm.advantage_fn_args.std_cal_level") == "batch"
        section = "kl_penalty_fn_args" if (source.text("algorithm.kl_penalty_fn") or "none") != "none" else "kl_loss_fn_args"
        moves = source.flag(f"algorithm.{section}.adaptive")
        where = f"each of the trainer's steps, where {interval} of them are one step here: set it to 1"
        if over_batch and advantage.get("credit") != "gae":
            synchronizer.lacks("sync_interval", f"advantages over the samples of {where}")
        if moves:
            synchronizer.lacks("sync_interval", f"a KL coefficient that adapts in {where}")
    return shared.ahead((synchronizer.whole("sync_offset") or 0) / interval, "finish")


_PRIORITIES = ("linear_decay", "decay_limit_randomization")


def replayed(source: Source) -> dict[str, Any]:
    """Refuse a priority queue whose order matters: it takes samples of the latest weights first and may use them again."""
    buffer = source.under(BUFFER)
    enabled = next((key for key in ("replay_buffer.enable", "use_priority_queue") if buffer.flag(key)), None)
    if enabled is None:
        return {}
    is_old = enabled == "use_priority_queue"
    place = buffer if is_old else buffer.under("replay_buffer.")
    arguments = buffer.under("replay_buffer_kwargs." if is_old else "replay_buffer.priority_fn_args.")
    priority, capacity = (arguments if is_old else place).text("priority_fn") or _PRIORITIES[0], buffer.whole("capacity")
    reasons = {
        "samples that are used again after some seconds": place.value("reuse_cooldown_time") is not None,
        f"the priority {priority}: known here are {', '.join(_PRIORITIES)}": priority not in _PRIORITIES,
        "priorities with noise": arguments.number("sigma"),
        "the latest samples first, while a sync_offset keeps older ones": source.whole("synchronizer.sync_offset"),
        "a queue that drops samples": capacity and capacity < source.count("buffer.batch_size") * period(source),
    }
    for reason in (reason for reason, is_asked in reasons.items() if is_asked):
        buffer.lacks(enabled, reason)
    return {}


def batch(source: Source) -> dict[str, Any]:
    tasks, taken = source.count("buffer.batch_size"), source.whole("buffer.train_batch_size") or 0
    if not samples(source):
        return {"data.prompts_per_step": taken or tasks} | legacy.pairs(source, kind(source))
    group, steps, experts = group_size(source), period(source), expert_batch(source) if mixes(source) else 0
    if (taken or mixes(source)) and taken != tasks * group + experts:
        sampled = f"{tasks} x {group}{f' and {experts} of an expert' if experts else ''}"
        reason = f"a trainer's step of {taken} samples where the explorer's step has {sampled}: both numbers must be equal"
        source.lacks("buffer.train_batch_size", reason)
    return {
        "data.prompts_per_step": tasks * steps,
        "data.expert_per_step": experts * steps or None,
        "algorithm.group_size": group,
        "algorithm.updates_per_step": steps,
        "algorithm.values_per": "update" if uses_critic(source) and steps > 1 else None,
    }


def epochs(source: Source) -> dict[str, Any]:
    """Return our key of the passes over each of the trainer's batches."""
    passes = source.whole(ACTOR + "ppo_epochs") or 1
    if samples(source):
        return {"algorithm.ppo_epochs": passes}
    if passes > 1:
        source.lacks(ACTOR + "ppo_epochs", "several passes over the rows of a step without sampling: use trainer.epochs")
    return {}
