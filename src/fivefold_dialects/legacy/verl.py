"""What verl called things until 2025, the defaults of its releases, and rLLM's verl of 2025-05 (verl.yaml has the rows)."""

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
"""Keys of the recipe entropy next to those that verl reads."""
_IMPORTANCE = "algorithm.rollout_is"
LEVELS = ("token", "sequence", "geometric")
UNLESS_IN_LOSS = "unless actor.use_kl_loss"
"""What algorithm.use_kl_in_reward was before there was such a key."""
_CONTENT = load("legacy/verl")
VERSIONS: dict[str, dict[str, Any]] = {month: defaults_of(changed) for month, changed in _CONTENT["versions"].items()}
"""Month of a release -> defaults that were others then."""
MEGATRON_VERSIONS = {
    month: {**defaults, **defaults_of(_CONTENT["megatron"].get(month, {}))} for month, defaults in VERSIONS.items()
}
"""The same for ppo_megatron_trainer.yaml, which says more of itself."""
GONE = {
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "2025-02",
    "critic.model.fsdp_config.grad_offload": "2025-02",
    "trainer.val_generations_to_log_to_wandb": "2025-03",
    "trainer.remove_previous_ckpt_in_save": "2025-03",
}
"""Keys that no later release starts with: a configuration that has one is of that month or before."""
_CAME = ("algorithm.use_kl_in_reward", *(f"{_A}{name}" for name in ("loss_agg_mode", "clip_ratio_low", "clip_ratio_c")))
_OF_FORKS = ("algorithm.mask_truncated_samples", _A + "use_token_level_loss")
_OF_2025_04 = known("verl-2025-04")
RLLM_ASYNC = "verl.trainer.main_ppo_async"
"""Of rLLM's verl of 2025-05: a step ahead, on the node's GPUs that do not train (ray_trainer_async.py)."""


def release_of(settings: Mapping[str, Any]) -> str:
    """The month of the release that a configuration of main_ppo must be of, by keys that are gone since; "" for any."""
    months = [month for key, month in GONE.items() if key in settings]
    is_main = settings.get("-m") in (None, "verl.trainer.main_ppo")
    # Forks have kept some and brought others.
    return min(months) if months and is_main and not any(key in settings for key in (*_CAME, *_OF_FORKS)) else ""


def say_which_entropy(source: Source) -> dict[str, Any]:
    """Name the older default of a coefficient that is left out, where no key shows that the configuration is a later one."""
    key, dapo = "actor_rollout_ref.actor.entropy_coeff", ("recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo")
    is_of_then = source.settings.get("-m") in (None, "verl.trainer.main_ppo", *dapo) and all(
        name in _OF_2025_04 for name in source.settings if name != "-m"
    )
    if is_of_then and not source.has(key) and not source.number(key):
        source.note(f"{key} is left out: 0, as in verl since 2025-04-17; it was 0.001 before, with --from verl@2025-04")
    return {}


def say_where_kl_was(source: Source) -> None:
    """Name the release that read a coefficient, where the configuration may be of the time when verl did."""
    if source.has("algorithm.use_kl_in_reward") or source.has(_A + "use_kl_loss"):
        return
    source.lacks(
        "algorithm.kl_ctrl.kl_coef",
        "read with use_kl_in_reward only; until 2025-03 verl took it off rewards wherever use_kl_loss was false: "
        "`--from verl@2025-03`",
        changes_result=False,
    )


def is_rllm(source: Source) -> bool:
    return source.text("-m") == RLLM_ASYNC


def bypasses(source: Source, is_fully_async: bool) -> bool | None:
    """Old log-probs are the engine's, as rLLM's verl and fully_async_policy until 2026-02 say it; None where they do not."""
    said = source.under("async_training.")
    if is_rllm(source):
        return source.flag(_R + "enable_log_prob")
    if not is_fully_async or not (said.has("use_rollout_log_probs") or said.has("compute_prox_log_prob")):
        return None
    # Recomputed by the weights of the last sync, or, without the engine's, by those of each batch.
    if said.has("use_rollout_log_probs") and not said.flag("use_rollout_log_probs"):
        if (said.whole("trigger_parameter_sync_step") or 1) > 1:
            said.lacks("use_rollout_log_probs", "old log-probs by the weights of each of the trainer's batches: say true")
        return False
    return not said.flag("compute_prox_log_prob")


def of_rllm(source: Source) -> dict[str, Any]:
    """What rLLM's verl does with advantages besides."""
    found: dict[str, Any] = {}
    if source.flag("algorithm.mask_truncated_samples") and source.text("algorithm.adv_estimator") == "grpo":
        found["overlong_zero"] = True
    if source.flag("algorithm.clip_advantages"):
        found["advantage_clip"] = 1.0
    return found


def evaluation(source: Source) -> dict[str, Any] | None:
    """Of rLLM's verl, which knows no val_kwargs: its top_p is a number of the code; None of verl's own."""
    if not (source.has(_R + "n_val") or source.has(_R + "val_temperature")):
        return None
    temperature = source.number(_R + "val_temperature") if source.has(_R + "val_temperature") else 0.6
    if not temperature:
        return {"eval.samples": 0}
    samples = source.count(_R + "n_val") if source.has(_R + "n_val") else 8
    return {"eval.samples": samples, "eval.temperature": temperature, "eval.top_p": 0.95}


def older(source: Source) -> dict[str, Any]:
    """What keys of older releases say, where the configuration has them."""
    found: dict[str, Any] = {}
    for key, ours in ((f"{_A}fsdp_config", "policy"), ("critic.model.fsdp_config", "critic")):
        if source.has(f"{key}.grad_offload") and source.flag(f"{key}.grad_offload"):
            found[f"{ours}.offload.gradients"] = True
    if "critic.offload.gradients" in found and (source.text("algorithm.adv_estimator") or "gae") != "gae":
        del found["critic.offload.gradients"]
    for key, read in _READ_NOWHERE.items():
        if source.has(key) and source.text(key) != source.text(read):
            source.lacks(key, f"verl's loss reads {read}: say it there")
    return found | importance(source)


def importance(source: Source) -> dict[str, Any]:
    """What algorithm.rollout_is and the keys next to it say."""
    said = source.under(_IMPORTANCE)
    threshold = said.number("_threshold") if said.has("_threshold") else None
    if not threshold:
        return {}
    level, mode = said.text("_level") or "token", said.text("_mode") or "truncate"
    if level not in LEVELS:
        said.lacks("_level", f"the weight {level}: known here are {', '.join(LEVELS)}")
        return {}
    if not said.flag(""):
        if mode != "truncate" or (said.has("_veto_threshold") and said.number("_veto_threshold")):
            said.lacks("_mode", "rejection without weights")
        return {}
    if mode not in ("truncate", "clip", "mask"):
        said.lacks("_mode", f"weights outside of their bounds by {mode}: known here are truncate, clip and mask")
    found: dict[str, Any] = {"weight": level, "high": threshold, "outside": "truncate" if mode == "truncate" else "mask"}
    found |= veto(said, "_veto_threshold")
    if mode != "truncate":
        found["low"] = said.number("_threshold_lower") or 1 / threshold
    return {f"algorithm.rollout_correction.{key}": value for key, value in found.items()}


def veto(said: Source, key: str = "rollout_token_veto_threshold") -> dict[str, Any]:
    """What leaves a response out for one token."""
    bound = said.number(key) if said.has(key) else None
    if bound is None:
        return {}
    if not 0 < bound < 1:
        raise UnreadableError(f"{said.prefix}{key} must be between 0 and 1: got {bound:g}")
    return {"reject_divergence": {"max_drop": -math.log(bound)}}


def rejection(said: Source, name: str) -> dict[str, Any]:
    """rollout_rs of until 2026-01: one ratio within its bounds."""
    upper = said.number("rollout_rs_threshold")
    if not upper or upper < 0:
        raise UnreadableError(f"{said.prefix}rollout_rs_threshold must be above 0 where rollout_rs is {name}: got {upper}")
    lower = said.number("rollout_rs_threshold_lower") if said.has("rollout_rs_threshold_lower") else None
    return {"reject": name, "reject_low": lower or 1 / upper, "reject_high": upper}
