"""What verl called things in older releases, and keys that its users write though nothing reads them."""

from __future__ import annotations

import math
from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.shared import SHOWN
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.table import Section, fixed, lacks, used

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_READ_NOWHERE = {
    **{f"{_A}{name}": f"{_A}policy_loss.{name}" for name in ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    **{f"{_A}{name}": f"{_A}policy_loss.{name}" for name in ("kl_cov_ratio", "ppo_kl_coef")},
}
"""Keys of the recipe entropy beside those that verl reads."""
_IMPORTANCE = "algorithm.rollout_is"
LEVELS = ("token", "sequence", "geometric")
FIRST_ROWS = (
    "`FILE[:N]`: the first rows of the file, as in verl where data.shuffle is false; where it is true verl draws as many at "
    "random (rl_dataset.py:185)."
)

SECTION = Section.of(
    "Older releases",
    used(
        " ".join(f"{_IMPORTANCE}{name}" for name in ("", "_level", "_mode", "_threshold", "_threshold_lower")),
        "algorithm.rollout_correction",
        "Of 2025-10 (mismatch_helper.py): weights where rollout_is is true and a threshold is set, cut off above it "
        "(truncate), or 0 outside of both bounds (clip, later mask); the lower one is 1 / the upper when left out.",
    ),
    used(
        f"{_IMPORTANCE}_veto_threshold algorithm.rollout_correction.rollout_token_veto_threshold",
        "algorithm.rollout_correction.reject_divergence",
        "A response with a token whose ratio trainer / engine is below it is left out: max_drop, of -log of it.",
    ),
    used(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "algorithm.rollout_correction.reject_low",
        "Until 2026-01, with rollout_rs token, sequence or geometric: the ratio trainer / engine itself, of a token, of a "
        "whole response or of its geometric mean, within both bounds (rollout_corr_helper.py of 418f964).",
    ),
    used(
        f"{_A}fsdp_config.grad_offload critic.model.fsdp_config.grad_offload",
        "policy.offload.gradients critic.offload.gradients",
        "Until 2025-02; verl has read it nowhere since.",
    ),
    fixed(
        "trainer.val_generations_to_log_to_wandb",
        "changes what is shown, not what is learned. Of 2025-02 and 03: where no key speaks of a later one, the defaults "
        "are those of that release (KL taken off rewards unless use_kl_loss, entropy_coeff 0.001, one clip_ratio), as with "
        "fsdp_config.grad_offload and trainer.remove_previous_ckpt_in_save",
    ),
    used(tuple(_READ_NOWHERE), (), "Read nowhere in verl: accepted where actor.policy_loss says the same."),
    used("reward_model.reward_manager.name", "reward.functions", "Of 2026-02, before reward.reward_manager.name."),
    used("reward_model.model_path", "reward.model.path reward.judge.model", "Of 2026-02, before reward.reward_model."),
    lacks(
        _R + "chat_scheduler",
        "requests that a program of one's own sends",
        [
            "examples.ppo_trainer.naive_chat_scheduler.NaiveChatCompletionScheduler",
            "verl.workers.rollout.chat_scheduler.NaiveChatCompletionScheduler",
            "examples.ppo_trainer.naive_chat_scheduler.MicroBatchChatCompletionScheduler",
        ],
    ),
    fixed(
        "actor_rollout_ref.ref.param_offload "
        "reward_model.param_offload critic.param_offload critic.grad_offload critic.optimizer_offload",
        "where Megatron's workers kept their state until 2025-03: megatron.param_offload says it",
    ),
    fixed("actor_rollout_ref.critic.**", "read nowhere: the critic's section is critic", takes_any=True),
    fixed(
        "trainer.npu_profile.options.* actor_rollout_ref.profiler.* **.profiler.discrete trainer.profile_steps "
        "trainer.profile_continuous_steps trainer.dump_high_diff_*",
        SHOWN,
        takes_any=True,
    ),
)


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
    """algorithm.rollout_is and its kin."""
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


def rows(source: Source, key: str = "data.train_max_samples") -> dict[str, Any]:
    """The first rows of the training data."""
    count = (source.whole(key) if source.has(key) else None) or 0
    if count <= 0:
        return {}
    files = shared.files(source, "data.train_files") or []
    if len(files) != 1:
        source.lacks(key, "the first rows of several files together: write `FILE[:N]` for each in data.train")
        return {}
    return {"data.train": [f"{files[0]}[:{count}]"]}
