"""Translate siiRL, a fork of verl with its own defaults, started as `python3 -m siirl.main_dag key=value ...`.

Missing features of its Megatron path were read in siiRL af00a77; comments and notes cite the place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold_dialects import verl, verl_algorithm, verl_models, verl_rollout
from fivefold_dialects.known import known
from fivefold_dialects.legacy import verl as legacy
from fivefold_dialects.source import Source
from fivefold_dialects.system import dialect
from fivefold_dialects.table import table

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

PROGRAMS = ("siirl.main_dag", "siirl.client.main_dag")
VARIABLES = {
    "TENSORBOARD_DIR": "TensorBoard's files are in trainer.run_dir/tensorboard",
    "SIIRL_LOG_VERBOSITY": "the terminal has one line for each step",
    "SIIRL_LOGGING_FILENAME": "the output of each rank is in trainer.run_dir/logs",
}
"""Variables that a script exports and that have no effect here -> the sentence that says what to use instead."""


def program(source: Source) -> dict[str, Any]:
    if source.text("-m") not in (None, *PROGRAMS):
        source.lacks("-m", f"a program that is not siiRL's: known here are {', '.join(PROGRAMS)}")
    if (source.text("algorithm.workflow_type") or "default") == "dapo" and not source.has("algorithm.filter_groups.enable"):
        source.lacks("algorithm.workflow_type", "DAPO's workflow without algorithm.filter_groups.enable: set that key")
    return {}


def megatron_path(source: Source) -> dict[str, Any]:
    """Report the keys that siiRL's Megatron path ignores; return no keys of ours."""
    if not verl_models.is_megatron(source):
        return {}
    if (source.whole(_A + "ppo_epochs") or 1) > 1:
        source.lacks(_A + "ppo_epochs", "siiRL's Megatron actor makes one pass over a rollout with any value: set it to 1")
    for name in ("lr_decay_style", "lr_decay_steps", "min_lr", "lr_warmup_init"):
        source.fixed(f"{_A}optim.{name}", "siiRL never steps the schedule of its Megatron path: the rate stays the same")
    source.fixed(
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "siiRL's Megatron path sets a method without a granularity (megatron/worker.py:93), so nothing is recomputed; "
        "override_transformer_config.recompute_granularity decides",
    )
    source.fixed(_A + "megatron.sequence_parallel", "siiRL shards sequences wherever tensor parallelism is above 1")
    return {}


def optimizer(source: Source) -> dict[str, Any]:
    """Return our keys of the optimizer as for verl, with the learning rate of siiRL's Megatron path."""
    found = verl_models.optimizer(source)
    if not verl_models.is_megatron(source):
        return found
    # siiRL never steps a scheduler (megatron_workers.py): the learning rate stays that of step 0.
    if found["policy.optimizer.warmup_steps"]:
        source.lacks(
            _A + "optim.lr_warmup_steps",
            "siiRL never steps the schedule of its Megatron path, so that with a warm-up the rate stays 0: leave it out",
        )
    found |= {"policy.optimizer.schedule": "constant"}
    return found | {f"policy.optimizer.{name}": None for name in ("min_lr", "decay_steps")}


def rewards(source: Source) -> dict[str, Any]:
    found = verl_rollout.rewards(source)
    return found | ({"reward.chosen_as": "siirl"} if "reward.chosen_as" in found else {})


def is_cpgd(source: Source) -> bool:
    """Return whether the method is CPGD, by any of the keys for it; the program of 2025 has no loss_mode."""
    named = "cpgd" in (source.text("algorithm.adv_estimator"), source.text(_A + "policy_loss.loss_mode"))
    return named or source.flag(_A + "use_cpgd_loss")


def advantage(source: Source) -> dict[str, Any]:
    if source.text("algorithm.adv_estimator") != "cpgd":
        return verl_algorithm.advantage(source)
    weight = source.text("algorithm.weight_factor_in_cpgd") or "STD_weight"
    normalize = {"STD_weight": "group", "naive": "none"}.get(weight)
    if normalize is None:
        source.lacks("algorithm.weight_factor_in_cpgd", f"the weight {weight} of advantages: known are STD_weight, naive")
    found: dict[str, Any] = {"name": "cpgd", "advantage": "group", "normalize": normalize}
    if source.count(_R + "n") == 1:
        # siiRL gives a group of one the mean 0 and the deviation 1.
        found |= {"advantage": "reward", "normalize": "none"}
    return {f"algorithm.{key}": value for key, value in (found | {"whiten": False, "credit": "response"}).items()}


def loss(source: Source) -> dict[str, Any]:
    if not is_cpgd(source):
        return verl_algorithm.loss(source, "siiRL")
    said, asked = source.under(_A), source.text("algorithm.adv_estimator") == "cpgd"
    mode = said.text("policy_loss.loss_mode")
    if mode not in (None, "vanilla", "cpgd"):
        said.lacks("policy_loss.loss_mode", f"CPGD with the loss {mode}")
    if verl_models.is_megatron(source):
        source.lacks(
            "algorithm.adv_estimator" if asked else _A + "use_cpgd_loss", "CPGD, which siiRL's Megatron actor lacks"
        )
    program = source.text("-m") or ""
    if mode != "cpgd" and not asked and not program.startswith("siirl.client"):
        said.lacks("use_cpgd_loss", "PPO's clip with CPGD's drift, as in siiRL since 2025-10: for CPGD set loss_mode: cpgd")
    drift = said.number("policy_drift_coeff") if asked or said.flag("use_cpgd_loss") else 0.0
    found: dict[str, Any] = {"surrogate": "cpgd", "drift_coef": drift or 0.0}
    found["aggregate"] = verl_algorithm.CHOICES[_A + "loss_agg_mode"].read(source)
    for name in ("low", "high"):
        bound = said.number(f"clip_ratio_{name}")
        found[f"clip_{name}"] = said.number("clip_ratio") if bound is None else bound
    return {f"algorithm.{key}": value for key, value in found.items()}


_REPLACED: dict[Any, Any] = {
    verl.program: program,
    verl_algorithm.advantage: advantage,
    verl_algorithm.loss: loss,
    verl_models.optimizer: optimizer,
    verl_rollout.rewards: rewards,
}
DERIVED = tuple(_REPLACED.get(function, function) for function in verl.DERIVED if function is not legacy.say_which_entropy)
_OWN = table("siirl", (*DERIVED, megatron_path), verl.CONVERTERS, known=known("verl", "siirl"), page_of=verl.TABLE)
TABLE = replace(_OWN, defaults={**verl.TABLE.defaults, **_OWN.defaults})
translate = dialect("siirl", TABLE, config_names=("ppo_trainer", "ppo_megatron_trainer"), variables=VARIABLES)
