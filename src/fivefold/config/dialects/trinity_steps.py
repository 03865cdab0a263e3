"""Trinity-RFT's steps, which are counted between two syncs, and their batches -> ours."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.trinity_algorithm import ADVANTAGES, ALGORITHMS, chosen, expert_batch, kind, mixes, offline
from fivefold.config.dialects.trinity_keys import ACTOR, BUFFER


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


def batch(source: Source) -> dict[str, Any]:
    tasks, taken = source.count("buffer.batch_size"), source.whole("buffer.train_batch_size") or 0
    if offline(source):
        # Until 2025-05 a pair counted twice where samples were divided into updates (verl_config.py, synchronize_config).
        twice = kind(source) == "dpo" and source.has(ACTOR + "alg_type")
        return {"data.prompts_per_step": taken or tasks} | ({"algorithm.updates_per_step": 2} if twice else {})
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
