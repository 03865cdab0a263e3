"""Translate verl's programs that sample ahead of the trainer: one_step_off_policy, fully_async_policy, trainer.v1's modes.

tables/verl.yaml, at their keys, says what one step is. Source: verl b178a3cd (2026-01), d23b2829 (2026-08) and 1dda039b
(2026-11); for partial_rollout, verl-recipe 48ea0a79.
"""

from __future__ import annotations

from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.legacy import verl as legacy
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import listed

_A, _R, _S = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "async_training."
ONE_STEP_OFF, FULLY_ASYNC = listed("verl", "one_step_off"), listed("verl", "fully_async")
"""Programs that sample one step ahead, and a part of a step, on separate GPUs."""
PARTIAL_ROLLOUT = "recipe.partial_rollout.main_ppo"
"""Program that samples one batch ahead, on the policy's GPUs (prompt_manager.py, _PREFETCH_FACTOR)."""
_V1 = "trainer.v1."
_MODE = _V1 + "trainer_mode"


def mode(source: Source) -> str:
    """Return the mode of trainer.v1; `sync` if the configuration chooses another trainer."""
    is_other = source.has("trainer.use_v1") and not source.flag("trainer.use_v1")
    return "sync" if is_other else source.text(_MODE) or "sync"


def is_v1(source: Source) -> bool:
    """Return whether the run uses the trainer of 2026-08 and later (ppo/v1), by keys that only this trainer reads."""
    return (source.has("trainer.use_v1") and source.flag("trainer.use_v1")) or bool(source.keys(_V1))


def is_separate(source: Source) -> bool:
    return mode(source) == "separate_async"


def is_colocated(source: Source) -> bool:
    """Return whether responses are sampled on the policy's GPUs while it trains."""
    return mode(source) == "colocate_async" or source.text("-m") == PARTIAL_ROLLOUT


def is_apart(source: Source) -> bool:
    return source.text("-m") in (*ONE_STEP_OFF, *FULLY_ASYNC) or is_separate(source)


def is_fully_async(source: Source) -> bool:
    return source.text("-m") in FULLY_ASYNC


def engine_gpus(source: Source) -> int:
    """Return the number of GPUs of an engine that has separate GPUs."""
    if (split := legacy.split_gpus(source)) is not None:
        return split[1]
    start = _R if is_separate(source) else "rollout."
    return source.count(start + "nnodes") * source.count(start + "n_gpus_per_node")


def ahead(source: Source) -> dict[str, Any]:
    if source.text("-m") in ONE_STEP_OFF:
        return shared.ahead(1, "finish")
    if source.text("-m") == PARTIAL_ROLLOUT:
        return shared.ahead(1, "continue", "carry")
    if (kind := mode(source)) in ("colocate_async", "separate_async"):
        section = source.under(f"{_V1}{kind}.")
        return shared.ahead(section.count("num_warmup_batches"), "continue", "carry")
    if kind != "sync":
        source.lacks(_MODE, f"{kind}: known here are sync, colocate_async and separate_async")
    if not is_fully_async(source):
        return {}
    interrupt = "continue" if source.flag(_S + "partial_rollout") else "finish"
    return shared.ahead(source.number(_S + "staleness_threshold") or 0.0, interrupt, "carry")


def batch(source: Source) -> dict[str, Any]:
    """Return our keys of one step, which is everything between two syncs in fully_async_policy."""
    section, mini = source.under(_S), source.count(_A + "ppo_mini_batch_size")
    syncs, batches = section.count("trigger_parameter_sync_step"), section.count("require_batches")
    if min(syncs, batches, mini) < 1:
        keys = f"{_S}trigger_parameter_sync_step, require_batches and {_A}ppo_mini_batch_size"
        raise UnreadableError(f"{keys} must be at least 1: got {syncs}, {batches} and {mini}")
    if source.flag("algorithm.filter_groups.enable"):
        source.lacks("algorithm.filter_groups.enable", "dynamic sampling, which this program does not do: set it to false")
    _check_batches(source, _S + "trigger_parameter_sync_step", syncs, batches)
    ours = {"data.prompts_per_step": syncs * batches * mini, "algorithm.updates_per_step": syncs * batches}
    return ours | _values(source, syncs)


def separate_batch(source: Source, batch: dict[str, Any]) -> dict[str, Any]:
    """Return `batch`, our keys of a step, for separate_async, where each update is one of the trainer's batches."""
    count, key = int(batch["algorithm.updates_per_step"]), f"{_V1}separate_async.parameter_sync_step"
    if source.has(key) and source.whole(key) != count:
        source.lacks(key, f"verl refuses it: it must be train_batch_size / ppo_mini_batch_size = {count}")
    _check_batches(source, key, count, 1)
    return batch | _values(source, count)


def _check_batches(source: Source, key: str, count: int, updates: int) -> None:
    """Refuse settings that act per batch of the trainer (of `updates` updates) if `count` batches are one step here."""
    if count < 2:
        return
    name = source.text("algorithm.adv_estimator") or "gae"
    moves = source.flag("algorithm.use_kl_in_reward") and source.text("algorithm.kl_ctrl.type") == "adaptive"
    reasons = {
        "several passes over each of the trainer's batches": (source.whole(_A + "ppo_epochs") or 1) > 1,
        "values that are computed again for batches of several updates": name == "gae" and updates > 1,
        "advantages over the samples of each of the trainer's batches": name.startswith("reinforce_plus_plus"),
        "a KL coefficient that adapts in each of the trainer's batches": moves,
    }
    for reason in (reason for reason, is_asked in reasons.items() if is_asked):
        source.lacks(key, f"{reason}, where {count} of them are one step here: set it to 1")


def _values(source: Source, count: int) -> dict[str, Any]:
    """Return our key of when values are computed: the critic's weights after the trainer's previous batch compute them."""
    is_critic = (source.text("algorithm.adv_estimator") or "gae") == "gae"
    return {"algorithm.values_per": "update" if count > 1 and is_critic else None}


def schedule(source: Source, style: str, warmup: float) -> dict[str, Any]:
    """Return our key of what the learning rate counts: batches of the trainer (fsdp_workers.py, update_actor)."""
    if style != "constant" or 0 < warmup < 1:
        key = "lr_warmup_steps_ratio" if style == "constant" else "lr_scheduler_type"
        reason = "a schedule over the whole run, whose length this program does not pass to its optimizer"
        source.lacks(f"{_A}optim.{key}", reason)
    batches = source.count(_S + "require_batches") if is_fully_async(source) else 1
    return {"schedule_per": batches * (source.whole(_A + "ppo_epochs") or 1)}


def bypasses(source: Source) -> bool:
    """Return whether the old log-probs are those of the engine."""
    older = legacy.bypasses(source, is_fully_async(source))
    return source.flag("algorithm.rollout_correction.bypass_mode") if older is None else older


def steps(source: Source) -> int:
    """Return the number of steps of the run; total_rollout_steps counts prompts."""
    return source.count("rollout.total_rollout_steps") // int(batch(source)["data.prompts_per_step"])


def in_flight(source: Source, replicas: int, usual: int | None) -> dict[str, int]:
    """Return our key that limits how many samples are in flight at once."""
    if not is_fully_async(source):
        return {}
    samples = source.count(_S + "concurrent_samples_per_replica") * source.count(_R + "n") * replicas
    return shared.at_once(samples, replicas, usual)
