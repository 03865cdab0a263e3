"""Translate siiRL, a fork of verl with its own defaults, started as `python3 -m siirl.main_dag key=value ...`.

Missing features of its Megatron path were read in siiRL af00a77; comments and notes cite the place.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

from fivefold_dialects import verl, verl_algorithm, verl_models, verl_rollout
from fivefold_dialects.known import known
from fivefold_dialects.legacy import verl as legacy
from fivefold_dialects.source import Source
from fivefold_dialects.system import System
from fivefold_dialects.table import choices, table, when

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

CHOICES = choices("siirl")
PROGRAMS = ("siirl.main_dag", "siirl.client.main_dag")
VARIABLES = ("TENSORBOARD_DIR", "SIIRL_LOG_VERBOSITY", "SIIRL_LOGGING_FILENAME")
_DATE = re.compile(r"""\$\(date \+["']?([^)"']*)["']?\)""")


def dated(source: Source, key: str) -> str | None:
    """Return a path, with `$(date +FORMAT)` in the script replaced by the current time."""
    path = source.path(key)
    return path and _DATE.sub(lambda date: time.strftime(date[1]), path)


def program(source: Source) -> dict[str, Any]:
    if source.text("-m") not in (None, *PROGRAMS):
        source.lacks("-m", f"a program that is not siiRL's: known here are {', '.join(PROGRAMS)}")
    if (source.text("algorithm.workflow_type") or "default") == "dapo" and not source.has("algorithm.filter_groups.enable"):
        source.lacks("algorithm.workflow_type", "DAPO's workflow without algorithm.filter_groups.enable: set that key")
    return {}


def megatron_path(source: Source) -> dict[str, Any]:
    """Return our key of what siiRL's Megatron path always does; report the keys that it ignores."""
    if (source.whole(_A + "ppo_epochs") or 1) > 1:
        source.lacks(_A + "ppo_epochs", "siiRL's Megatron actor makes one pass over a rollout with any value: set it to 1")
    source.fixed(_A + "megatron.sequence_parallel", "siiRL shards sequences wherever tensor parallelism is above 1")
    return {"policy.sequence_parallel": True}


def memory(source: Source) -> dict[str, Any]:
    """Return our keys of recomputation and offload as for verl; gradient checkpointing recomputes with Megatron too."""
    ours = verl_models.memory(source)
    recomputes = any(key.startswith(("policy.recompute", "policy.megatron.transformer.recompute")) for key in ours)
    if verl_models.is_megatron(source) and not recomputes:
        ours["policy.recompute"] = "full" if source.flag(verl_models.CHECKPOINTING) else "none"
    return ours


def rewards(source: Source) -> dict[str, Any]:
    ours = verl_rollout.rewards(source)
    return ours | ({"reward.chosen_as": "siirl"} if "reward.chosen_as" in ours else {})


def is_cpgd(source: Source) -> bool:
    """Return whether the method is CPGD, by any of the keys for it; the program of 2025 has no loss_mode."""
    named = "cpgd" in (source.text("algorithm.adv_estimator"), source.text(_A + "policy_loss.loss_mode"))
    return named or source.flag(_A + "use_cpgd_loss")


def advantage(source: Source) -> dict[str, Any]:
    if source.text("algorithm.adv_estimator") != "cpgd":
        return verl_algorithm.advantage(source)
    normalize = CHOICES["algorithm.weight_factor_in_cpgd"].read(source)
    ours = {"name": "cpgd", "advantage": "group", "normalize": normalize, "whiten": False, "credit": "response"}
    if source.count(_R + "n") == 1:
        # siiRL gives a group of one the mean 0 and the deviation 1.
        ours |= {"advantage": "reward", "normalize": "none"}
    return {f"algorithm.{key}": value for key, value in ours.items()}


def loss(source: Source) -> dict[str, Any]:
    if not is_cpgd(source):
        return verl_algorithm.loss(source, "siiRL")
    actor, by_estimator = source.under(_A), source.text("algorithm.adv_estimator") == "cpgd"
    mode = actor.text("policy_loss.loss_mode")
    if mode not in (None, "vanilla", "cpgd"):
        actor.lacks("policy_loss.loss_mode", f"CPGD with the loss {mode}")
    if verl_models.is_megatron(source):
        key = "algorithm.adv_estimator" if by_estimator else _A + "use_cpgd_loss"
        source.lacks(key, "CPGD, which siiRL's Megatron actor lacks")
    if mode != "cpgd" and not by_estimator and not (source.text("-m") or "").startswith("siirl.client"):
        actor.lacks("use_cpgd_loss", "PPO's clip with CPGD's drift, as in siiRL since 2025-10: for CPGD set loss_mode: cpgd")
    drift = actor.number("policy_drift_coeff") if by_estimator or actor.flag("use_cpgd_loss") else 0.0
    mean = verl_algorithm.CHOICES[_A + "loss_agg_mode"].read(source)
    ours: dict[str, Any] = {"surrogate": "cpgd", "drift_coef": drift or 0.0, "aggregate": mean}
    ours |= {f"clip_{side}": actor.number(f"clip_ratio_{side}", actor.number("clip_ratio")) for side in ("low", "high")}
    return {f"algorithm.{key}": value for key, value in ours.items()}


_REPLACED: dict[Any, Any] = {
    verl.program: program,
    verl_algorithm.advantage: advantage,
    verl_algorithm.loss: loss,
    verl_models.memory: memory,
    verl_rollout.rewards: rewards,
}
DERIVED = tuple(_REPLACED.get(function, function) for function in verl.DERIVED if function is not legacy.say_which_entropy)
_CONVERTERS = {**verl.CONVERTERS, "dated": dated}
_OF_MEGATRON = when(verl_models.is_megatron, megatron_path)
_OWN = table("siirl", (*DERIVED, *_OF_MEGATRON), _CONVERTERS, known=known("verl", "siirl"), page_of=verl.TABLE)
TABLE = replace(_OWN, defaults={**verl.TABLE.defaults, **_OWN.defaults})
translate = System("siirl", (TABLE,), config_names=("ppo_trainer", "ppo_megatron_trainer"), variables=VARIABLES)
