"""Read verl's keys until 2025, its releases' defaults, and rLLM's fork of verl of 2025-05; verl.yaml has the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fivefold_dialects.known import known
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import defaults_of, load

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_READ_NOWHERE = {
    **{f"{_A}{name}": f"{_A}policy_loss.{name}" for name in ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    **{f"{_A}{name}": f"{_A}policy_loss.{name}" for name in ("kl_cov_ratio", "ppo_kl_coef")},
}
"""Keys that the recipe entropy sets but verl does not read -> the keys that verl reads."""
_IMPORTANCE = "algorithm.rollout_is"
LEVELS = ("token", "sequence", "geometric")
UNLESS_IN_LOSS = "unless actor.use_kl_loss"
"""Value of algorithm.use_kl_in_reward for releases that did not have this key."""
_CONTENT = load("legacy/verl")
VERSIONS: dict[str, dict[str, Any]] = {month: defaults_of(changed) for month, changed in _CONTENT["versions"].items()}
"""Month of a release -> its defaults that differ from today's."""
MEGATRON_VERSIONS = {
    month: {**defaults, **defaults_of(_CONTENT["megatron"].get(month, {}))} for month, defaults in VERSIONS.items()
}
"""Month of a release -> its defaults that differ from today's, for ppo_megatron_trainer.yaml."""
MANAGERS = ("reward_model.reward_manager", "reward_manager.name", "reward_model.reward_manager.name")
"""Keys for the name of the reward manager before `reward.reward_manager.name`."""
OVERLONG = (
    *("reward_model.reward_kwargs.overlong_buffer_cfg.", "reward_model.overlong_buffer."),
    "custom_reward_function.overlong_buffer.",
)
"""Sections of the penalty for long responses before `reward.reward_kwargs.overlong_buffer_cfg`."""
GONE = {
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "2025-02",
    "critic.model.fsdp_config.grad_offload": "2025-02",
    "trainer.val_generations_to_log_to_wandb": "2025-03",
    "trainer.remove_previous_ckpt_in_save": "2025-03",
}
"""Keys that later releases refuse -> the last month: a configuration with such a key is from that month or before."""
_CAME = ("algorithm.use_kl_in_reward", *(f"{_A}{name}" for name in ("loss_agg_mode", "clip_ratio_low", "clip_ratio_c")))
_OF_FORKS = ("algorithm.mask_truncated_samples", _A + "use_token_level_loss")
_OF_2025_04 = known("verl-2025-04")
RLLM_ASYNC = "verl.trainer.main_ppo_async"
"""Program of rLLM's verl of 2025-05: it samples one step ahead on the node's GPUs that do not train
(ray_trainer_async.py)."""


def release_of(settings: Mapping[str, Any]) -> str:
    """Return the month of the last release that accepts all keys of a main_ppo configuration; "" for the current release."""
    months = [month for key, month in GONE.items() if key in settings]
    is_main = settings.get("-m") in (None, "verl.trainer.main_ppo")
    # Forks have kept some of these keys and added others.
    return min(months) if months and is_main and not any(key in settings for key in (*_CAME, *_OF_FORKS)) else ""


def say_which_entropy(source: Source) -> dict[str, Any]:
    """Note the older default of entropy_coeff if it is left out and no key shows a later release; return no keys of ours."""
    key, dapo = "actor_rollout_ref.actor.entropy_coeff", ("recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo")
    is_of_then = source.settings.get("-m") in (None, "verl.trainer.main_ppo", *dapo) and all(
        name in _OF_2025_04 for name in source.settings if name != "-m"
    )
    if is_of_then and not source.has(key) and not source.number(key):
        source.note(f"{key} is left out: 0, as in verl since 2025-04-17; it was 0.001 before, with --from verl@2025-04")
    return {}


def say_where_kl_was(source: Source) -> None:
    """Report kl_coef without use_kl_in_reward, which releases until 2025-03 read, if the configuration may be that old."""
    if source.has("algorithm.use_kl_in_reward") or source.has(_A + "use_kl_loss"):
        return
    source.lacks(
        "algorithm.kl_ctrl.kl_coef",
        "read with use_kl_in_reward only; until 2025-03 verl subtracted this KL from rewards if use_kl_loss was false: "
        "for that use `--from verl@2025-03`",
        changes_result=False,
    )


def is_rllm(source: Source) -> bool:
    return source.text("-m") == RLLM_ASYNC


def split_gpus(source: Source) -> tuple[int, int] | None:
    """Return (GPUs that train, GPUs that sample) of rLLM's program, which splits each node; None for verl."""
    if not is_rllm(source):
        return None
    nodes, per_node = source.count("trainer.nnodes"), source.count("trainer.n_gpus_per_node")
    trained = source.count("trainer.n_training_gpus_per_node")
    return nodes * trained, nodes * (per_node - trained)


def bypasses(source: Source, is_fully_async: bool) -> bool | None:
    """Return whether the old log-probs are the engine's, by keys of rLLM's verl and of fully_async_policy until 2026-02.

    Return None if these keys are not set.
    """
    section = source.under("async_training.")
    if is_rllm(source):
        return source.flag(_R + "enable_log_prob")
    if not is_fully_async or not (section.has("use_rollout_log_probs") or section.has("compute_prox_log_prob")):
        return None
    # Old log-probs are recomputed by the weights of the last sync, or, with use_rollout_log_probs off, of each batch.
    if section.has("use_rollout_log_probs") and not section.flag("use_rollout_log_probs"):
        if (section.whole("trigger_parameter_sync_step") or 1) > 1:
            section.lacks("use_rollout_log_probs", "old log-probs by the weights of each of the trainer's batches: set true")
        return False
    return not section.flag("compute_prox_log_prob")


def of_forks(source: Source) -> dict[str, Any]:
    """Return our keys of what rLLM's verl adds to advantages, and of its evaluation (top_p is fixed in its code)."""
    ours: dict[str, Any] = {}
    if source.flag("algorithm.mask_truncated_samples") and source.text("algorithm.adv_estimator") == "grpo":
        ours["algorithm.overlong_zero"] = True
    if source.flag("algorithm.clip_advantages"):
        ours["algorithm.advantage_clip"] = 1.0
    if not (source.has(_R + "n_val") or source.has(_R + "val_temperature")):
        return ours
    temperature = source.number(_R + "val_temperature") if source.has(_R + "val_temperature") else 0.6
    if not temperature:
        return ours | {"eval.samples": 0}
    samples = source.count(_R + "n_val") if source.has(_R + "n_val") else 8
    return ours | {"eval.samples": samples, "eval.temperature": temperature, "eval.top_p": 0.95}


def batch_key(source: Source, is_v1: bool) -> str:
    """Return the key with the prompts of a step: verl until 0.8, without dynamic sampling, trains on all drawn prompts."""
    drawn, usual = "data.gen_batch_size", "data.train_batch_size"
    if source.flag("algorithm.filter_groups.enable") or is_v1 or not source.has(drawn):
        return usual
    if source.whole(drawn) in (None, source.whole(usual)):
        return usual
    source.note(
        f"{drawn} = {source.whole(drawn)} is the batch of a step, as in verl until 0.8; with trainer.use_v1=True (0.9) "
        f"it is {usual}"
    )
    return drawn


def evaluation_key(source: Source, is_fully_async: bool) -> str:
    """Return the key of the evaluation interval, rollout.test_freq until 2026-02; both keys count our steps."""
    return "rollout.test_freq" if is_fully_async and source.has("rollout.test_freq") else "trainer.test_freq"


def older(source: Source) -> dict[str, Any]:
    """Return our keys for the keys of older releases that the configuration has."""
    values: dict[str, Any] = {}
    for key, ours in ((f"{_A}fsdp_config", "policy"), ("critic.model.fsdp_config", "critic")):
        if source.has(f"{key}.grad_offload") and source.flag(f"{key}.grad_offload"):
            values[f"{ours}.offload.gradients"] = True
    if "critic.offload.gradients" in values and (source.text("algorithm.adv_estimator") or "gae") != "gae":
        del values["critic.offload.gradients"]
    for key, read in _READ_NOWHERE.items():
        if source.has(key) and source.text(key) != source.text(read):
            source.lacks(key, f"verl's loss reads {read}: set that key")
    return values | importance(source)


def importance(source: Source) -> dict[str, Any]:
    """Return our keys of the rollout correction for algorithm.rollout_is and its related keys."""
    section = source.under(_IMPORTANCE)
    threshold = section.number("_threshold") if section.has("_threshold") else None
    if not threshold:
        return {}
    level, mode = section.text("_level") or "token", section.text("_mode") or "truncate"
    if level not in LEVELS:
        section.lacks("_level", f"the weight {level}: known here are {', '.join(LEVELS)}")
        return {}
    if not section.flag(""):
        if mode != "truncate" or (section.has("_veto_threshold") and section.number("_veto_threshold")):
            section.lacks("_mode", "rejection without weights")
        return {}
    if mode not in ("truncate", "clip", "mask"):
        section.lacks(
            "_mode", f"the mode {mode} for weights outside of their bounds: known here are truncate, clip and mask"
        )
    ours: dict[str, Any] = {"weight": level, "high": threshold, "outside": "truncate" if mode == "truncate" else "mask"}
    ours |= veto(section, "_veto_threshold")
    if mode != "truncate":
        ours["low"] = section.number("_threshold_lower") or 1 / threshold
    return {f"algorithm.rollout_correction.{key}": value for key, value in ours.items()}


def may_sample_in_evaluation(source: Source) -> bool:
    """Return whether an evaluation samples if its temperature is above 0: without the agent loop it needs do_sample."""
    rollout = source.under(_R)
    has_loop = rollout.text("mode") != "sync" and rollout.text("name") != "hf"
    return has_loop or rollout.flag("val_kwargs.do_sample")


def veto(section: Source, key: str = "rollout_token_veto_threshold") -> dict[str, Any]:
    """Return our key that drops a response because of one token's ratio."""
    bound = section.number(key) if section.has(key) else None
    if bound is None:
        return {}
    if not 0 < bound < 1:
        raise UnreadableError(f"{section.prefix}{key} must be between 0 and 1: got {bound:g}")
    return {"reject_divergence": {"max_drop": -math.log(bound)}}


def rejection(section: Source, name: str) -> dict[str, Any]:
    """Return our keys of rejection by one ratio, as rollout_rs was until 2026-01."""
    upper = section.number("rollout_rs_threshold")
    if not upper or upper < 0:
        raise UnreadableError(f"{section.prefix}rollout_rs_threshold must be above 0 if rollout_rs is {name}: got {upper}")
    lower = section.number("rollout_rs_threshold_lower") if section.has("rollout_rs_threshold_lower") else None
    return {"reject": name, "reject_low": lower or 1 / upper, "reject_high": upper}
