"""verl's programs that sample ahead of the trainer: one_step_off_policy and fully_async_policy.

Of fully_async_policy, S = trigger_parameter_sync_step, R = require_batches, M = ppo_mini_batch_size and θ =
staleness_threshold. The trainer takes R x M prompts as they are complete, for R updates, and after S such batches gives its
weights to the engine: that is one step here, of S x R x M prompts and S x R updates, whose old log-probs are those of the
weights of its beginning. At a sync int((1 + θ) x S x R x M) prompts are given out and not used (fully_async_rollouter.py,
set_max_required_samples): rollout.max_staleness: θ. Read in verl b178a3cd (2026-01) and d23b2829 (2026-08).
"""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.source import Source, UnreadableError

_A, _R, _S = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "async_training."
ONE_STEP_OFF = ("recipe.one_step_off_policy.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
"""They sample a step ahead, on GPUs of their own."""
FULLY_ASYNC = (
    "recipe.fully_async_policy.fully_async_main",
    "verl.experimental.fully_async_policy.fully_async_main",
)
"""They sample a part of a step ahead, on GPUs of their own."""
_APART = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}
_BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
_PARTS = {
    _S + "staleness_threshold": 0.1,
    _S + "trigger_parameter_sync_step": 4,
    _S + "require_batches": 1,
    _S + "partial_rollout": True,
    _S + "concurrent_samples_per_replica": 16,
    "rollout.total_rollout_steps": 100,
    "data.gen_batch_size": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    # The older one computes old log-probs (until 2025-11), the newer one takes the engine's.
    **{name: _APART | (_BYPASS if name.startswith("verl.") else {}) for name in ONE_STEP_OFF},
    **dict.fromkeys(FULLY_ASYNC, _APART | _BYPASS | _PARTS),
}
"""Program -> what it takes for keys that a configuration leaves out, where that is not main_ppo's."""


def is_apart(source: Source) -> bool:
    return source.text("-m") in DEFAULTS


def is_fully_async(source: Source) -> bool:
    return source.text("-m") in FULLY_ASYNC


def ahead(source: Source) -> dict[str, Any]:
    if source.text("-m") in ONE_STEP_OFF:
        return shared.ahead(1, "finish")
    if not is_fully_async(source):
        return {}
    said = source.under(_S)
    return shared.ahead(
        said.number("staleness_threshold") or 0.0, "continue" if said.flag("partial_rollout") else "finish", "carry"
    )


def batch(source: Source) -> dict[str, Any]:
    """The step between two syncs."""
    said, mini = source.under(_S), source.count(_A + "ppo_mini_batch_size")
    syncs, batches = said.count("trigger_parameter_sync_step"), said.count("require_batches")
    if min(syncs, batches, mini) < 1:
        raise UnreadableError(
            f"{_S}trigger_parameter_sync_step, require_batches and {_A}ppo_mini_batch_size must be at least 1: got "
            f"{syncs}, {batches} and {mini}"
        )
    if said.flag("use_dynamic_resource_scheduling"):
        said.lacks("use_dynamic_resource_scheduling", "GPUs that move between trainer and engines")
    if said.has("enable_reward_queue") and said.flag("enable_reward_queue"):
        said.lacks("enable_reward_queue", "another recipe's queue of rewards")
    if source.flag("algorithm.filter_groups.enable"):
        source.lacks("algorithm.filter_groups.enable", "dynamic sampling, which this program leaves out: say false")
    name = source.text("algorithm.adv_estimator") or "gae"
    if syncs > 1:
        repeated = (source.whole(_A + "ppo_epochs") or 1) > 1
        whitened = name.startswith("reinforce_plus_plus")
        moves = source.flag("algorithm.use_kl_in_reward") and source.text("algorithm.kl_ctrl.type") == "adaptive"
        for is_asked, reason in (
            (repeated, "batches that are each gone through several times"),
            (name == "gae" and batches > 1, "values that are computed anew for batches of several updates"),
            (whitened, "advantages over the samples of each of the trainer's batches"),
            (moves, "a KL coefficient that moves with each of the trainer's batches"),
        ):
            if is_asked:
                said.lacks("trigger_parameter_sync_step", f"{reason}, where {syncs} of them are one step here: say 1")
    return {
        "data.prompts_per_step": syncs * batches * mini,
        "algorithm.updates_per_step": syncs * batches,
        "algorithm.values_per": "update" if syncs > 1 and name == "gae" else None,
    }


def schedule(source: Source, style: str, warmup: float) -> dict[str, Any]:
    """What the rate counts: verl moves it once in each of the trainer's batches (fsdp_workers.py, update_actor)."""
    if style != "constant" or 0 < warmup < 1:
        key = "lr_warmup_steps_ratio" if style == "constant" else "lr_scheduler_type"
        source.lacks(
            f"{_A}optim.{key}", "a schedule over the whole run, whose length this program does not tell its optimizer"
        )
    return {"schedule_per": source.count(_S + "require_batches") * (source.whole(_A + "ppo_epochs") or 1)}


def bypasses(source: Source) -> bool:
    """Old log-probs are the engine's."""
    said = source.under(_S)
    if not is_fully_async(source) or not (said.has("use_rollout_log_probs") or said.has("compute_prox_log_prob")):
        return source.flag("algorithm.rollout_correction.bypass_mode")
    # Until 2026-02: recomputed by the weights of the last sync, or, without the engine's, by those of each batch.
    if said.has("use_rollout_log_probs") and not said.flag("use_rollout_log_probs"):
        if (said.whole("trigger_parameter_sync_step") or 1) > 1:
            said.lacks("use_rollout_log_probs", "old log-probs by the weights of each of the trainer's batches: say true")
        return False
    return not said.flag("compute_prox_log_prob")


def steps(source: Source) -> int:
    """Of the run: total_rollout_steps counts prompts."""
    return source.count("rollout.total_rollout_steps") // int(batch(source)["data.prompts_per_step"])


def evaluation_key(source: Source) -> str:
    """rollout.test_freq until 2026-02; both count steps of ours."""
    return "rollout.test_freq" if is_fully_async(source) and source.has("rollout.test_freq") else "trainer.test_freq"


def in_flight(source: Source, replicas: int, usual: int | None) -> dict[str, int]:
    """Prompts that are sampled at once, each with its responses."""
    if not is_fully_async(source):
        return {}
    samples = source.count(_S + "concurrent_samples_per_replica") * source.count(_R + "n") * replicas
    return shared.at_once(samples, replicas, usual)
