"""Translate verl: the keys of `verl.trainer.main_ppo`, of the recipes that use it, and of the SFT trainers.

tables/verl.yaml has a row for each key. Values that depend on several keys are in verl_algorithm.py (the method),
verl_models.py (layout, batches, optimizers), verl_async.py (programs that sample ahead), verl_rollout.py (engines, rewards,
evaluation). legacy/ reads releases before 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold_dialects import shared, verl_async, verl_sft
from fivefold_dialects import verl_models as models
from fivefold_dialects.known import known
from fivefold_dialects.legacy import verl as legacy
from fivefold_dialects.legacy import verl_recipes as recipes
from fivefold_dialects.source import Source
from fivefold_dialects.system import System
from fivefold_dialects.table import Table, defaults_of, load, several, spelled_out, table, when
from fivefold_dialects.verl_algorithm import FIELDS, advantage, correction, dynamic_sampling, kl, loss, overlong
from fivefold_dialects.verl_rollout import engine, lengths, rewards, turns

_R = "actor_rollout_ref.rollout."
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    program: defaults_of(changed or {}) for program, changed in spelled_out(load("verl")["programs"]).items()
}
"""Supported programs -> their defaults that differ from main_ppo's."""


def program(source: Source) -> dict[str, Any]:
    name = source.text("-m")
    if name is not None and name not in OWN_DEFAULTS:
        source.lacks("-m", "a program other than verl.trainer.main_ppo: it may do things that no key shows")
    for key, is_read in ((_R + "nnodes", verl_async.is_separate(source)), ("rollout.nnodes", verl_async.is_apart(source))):
        if not is_read and source.has(key) and source.whole(key):
            source.lacks(key, "separate GPUs for sampling, which only one_step_off_policy and fully_async_policy use")
    return verl_async.ahead(source)


def overlong_prompts(source: Source, key: str) -> str:
    # verl may cut off a long prompt; here the run is refused instead, so no prompt is cut silently.
    return "drop" if source.flag(key) else "refuse"


def length_of_run(source: Source) -> dict[str, Any]:
    if verl_async.is_fully_async(source):
        return {"trainer.steps": verl_async.steps(source)}
    ours = shared.epochs_and_steps(source)
    if source.flag("algorithm.filter_groups.enable") and not verl_async.is_v1(source) and not verl_async.ahead(source):
        # This loop counts the batches that are drawn (dapo_ray_trainer.py); the newer trainer counts updates.
        ours["trainer.ends_with_data"] = True
    return ours


def evaluation_interval(source: Source) -> dict[str, Any]:
    """Return our key of the evaluation interval; without test_freq verl's PPO never evaluates, its SFT at the end."""
    ours = verl_sft.evaluation_interval(source, legacy.evaluation_key(source, verl_async.is_fully_async(source)))
    is_off = ours["trainer.eval_every"] == 0 and source.items("data.val_files")
    return ours | ({"trainer.eval_every": "never"} if is_off else {})


def profiler(source: Source) -> dict[str, Any]:
    is_on = any(source.flag(f"actor_rollout_ref.{role}.profiler.enable") for role in ("actor", "rollout", "ref"))
    if (steps := source.numbers("global_profiler.steps")) and is_on and source.text("global_profiler.tool") == "torch":
        return {"trainer.profile.steps": [int(step) for step in steps]}
    return {}


DERIVED = (
    *(program, advantage, loss, kl, correction, overlong, dynamic_sampling, FIELDS["template"], engine, turns),
    *(lengths, *when(legacy.may_sample_in_evaluation, FIELDS["evaluation"]), rewards),
    *(models.batch, models.layout, *when(models.is_megatron, models.megatron), models.low_rank, FIELDS["further_tokens"]),
    *(models.dtypes, models.memory, models.micro_batch, models.optimizer, models.critic),
    *(*when(models.uses_reference, models.reference), models.router_replay),
    *when(models.is_megatron, models.megatron_checkpoints),
    *(verl_sft.resume, length_of_run, evaluation_interval, profiler),
    *(verl_sft.first_rows, FIELDS["tracking"], recipes.prime, legacy.say_which_entropy, legacy.of_forks, legacy.older),
)
CONVERTERS = {"overlong_prompts": overlong_prompts}
TABLE = replace(
    table("verl", DERIVED, CONVERTERS, release_of=legacy.release_of, known=known("verl")), versions=legacy.VERSIONS
)
_OWN = {name: replace(TABLE, defaults={**TABLE.defaults, **usual}) for name, usual in OWN_DEFAULTS.items() if usual}
"""Tables of programs whose defaults differ from main_ppo's."""
MEGATRON = replace(TABLE, versions=legacy.MEGATRON_VERSIONS)
"""Table of ppo_megatron_trainer.yaml, whose defaults differed in older releases."""


def table_of(settings: Mapping[str, Any]) -> Table:
    """Return the table for these settings: that of PPO, of another program, or of the SFT trainers."""
    is_rl = any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings)
    if (of_program := _OWN.get(str(settings.get("-m")))) is not None:
        return of_program
    if "ppo_megatron_trainer" in str(settings.get("--config-name")):
        return MEGATRON
    if not is_rl and verl_sft.looks_like(settings):
        return verl_sft.table_of(settings)
    return TABLE


translate = System("verl", (TABLE, verl_sft.TABLE), table_of, tuple(several(load("verl")["config_names"])))
