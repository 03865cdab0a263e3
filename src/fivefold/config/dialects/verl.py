"""verl: Hydra's keys of `verl.trainer.main_ppo` and the recipes over it, and of its SFT trainers.

verl_rows.py has what becomes of each key; what several of them say together is in verl_algorithm.py (the method),
verl_layout.py, verl_training.py, verl_engine.py and verl_rewards.py. Here are the programs and the course of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.config.dialects import shared, verl_async, verl_older, verl_prime, verl_sft
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect
from fivefold.config.dialects.verl_algorithm import (
    SPPO,
    advantage,
    correction,
    dynamic_sampling,
    kl,
    loss,
    overlong,
)
from fivefold.config.dialects.verl_defaults import DEFAULTS, MEGATRON_VERSIONS, VERSIONS, release_of
from fivefold.config.dialects.verl_engine import engine, evaluation, sampling
from fivefold.config.dialects.verl_layout import (
    dtypes,
    layout,
    megatron,
    memory,
    micro_batch,
    router_replay,
)
from fivefold.config.dialects.verl_rewards import rewards
from fivefold.config.dialects.verl_rows import SECTIONS
from fivefold.config.dialects.verl_training import (
    batch,
    critic,
    further_tokens,
    low_rank,
    megatron_checkpoints,
    optimizer,
    reference,
)

_R = "actor_rollout_ref.rollout."

PROGRAMS = (
    "verl.trainer.main_ppo",
    "recipe.dapo.main_dapo",
    "recipe.dapo.src.main_dapo",
    "verl.trainer.main_ppo_sync",
    "recipe.transfer_queue.main_ppo",
    "verl.experimental.transfer_queue.main_ppo",
    "recipe.entropy.main_entropy",
    SPPO,
    verl_prime.PROGRAM,
)
"""Programs whose configuration says all of what they do."""


CONFIG_NAMES = (
    *(f"ppo_{engine}trainer" for engine in ("", "megatron_", "veomni_", "torchtitan_")),
    *(f"_generated_ppo_{engine}trainer" for engine in ("", "megatron_", "veomni_", "torchtitan_")),
    *(f"{start}ppo_{engine}trainer" for start in ("one_step_off_", "fully_async_") for engine in ("", "megatron_")),
    "transfer_queue_ppo_trainer", "transfer_queue_ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer",
    "sft_trainer", "sft_trainer_engine", "sppo_trainer", "prime_trainer", "entropy_trainer",
)  # fmt: skip
"""YAML files of these programs, whose values are the defaults of their tables."""
OTHER_PROGRAMS = {
    "verl.trainer.main_ppo_pipeline": "rLLM's updates by mini-batches as they are sampled, the longest responses first, one "
    "of which is left for the next step",
}
"""Programs that are refused, with what they do besides their keys."""


_DAPO = {name: {"reward_model.reward_manager": "dapo"} for name in PROGRAMS if name.startswith("recipe.dapo.")}
_OF_2025_04 = known("verl-2025-04")


def program(source: Source) -> dict[str, Any]:
    name = source.text("-m")
    if name is not None and name not in (*PROGRAMS, *verl_async.DEFAULTS):
        usual = "another program than verl.trainer.main_ppo: it may do what no key says"
        source.lacks("-m", OTHER_PROGRAMS.get(name, usual))
    elsewhere = "GPUs of their own for sampling, of another program than one_step_off_policy and fully_async_policy"
    if not verl_async.is_separate(source) and source.has(_R + "nnodes") and source.whole(_R + "nnodes"):
        source.lacks(_R + "nnodes", elsewhere)
    if not verl_async.is_apart(source) and source.has("rollout.nnodes") and source.whole("rollout.nnodes"):
        source.lacks("rollout.nnodes", elsewhere)
    return verl_async.ahead(source)


def overlong_prompts(source: Source) -> dict[str, Any]:
    if source.flag("data.filter_overlong_prompts"):
        return {"data.overlong_prompts": "drop"}
    # Where prompts would be cut off or refused, the run is refused if there is such a prompt: nothing is cut silently.
    return {"data.overlong_prompts": "refuse"}


def template(source: Source) -> dict[str, Any]:
    start = "data.apply_chat_template_kwargs"
    whole = source.value(start) if source.has(start) else None
    found = dict(whole) if isinstance(whole, dict) else {}
    found |= {key.removeprefix(f"{start}."): source.value(key) for key in source.keys(f"{start}.")}
    return {"data.chat_template_kwargs": found} if found else {}


def run(source: Source) -> dict[str, Any]:
    mode = (source.text("trainer.resume_mode") or "auto").lower()
    resume = {"auto": "auto", "disable": "never", "off": "never"}.get(mode)
    if mode == "resume_path":
        resume = source.text("trainer.resume_from_path")
    elif resume is None:
        source.lacks("trainer.resume_mode", f"{mode}: known here are auto, disable, resume_path")
    keep = source.whole("trainer.max_actor_ckpt_to_keep")
    return {"trainer.resume": resume, "trainer.keep": keep if keep and keep > 0 else EVERY_CHECKPOINT}


def length_of_run(source: Source) -> dict[str, Any]:
    if verl_async.is_fully_async(source):
        return {"trainer.steps": verl_async.steps(source)}
    found = shared.epochs_and_steps(source)
    if source.flag("algorithm.filter_groups.enable") and not verl_async.is_v1(source) and not verl_async.ahead(source):
        # The loop goes over the batches that are drawn (dapo_ray_trainer.py); the newer trainer's over updates.
        found["trainer.ends_with_data"] = True
    return found


def evaluation_interval(source: Source) -> dict[str, Any]:
    if source.text(key := verl_async.evaluation_key(source)) == "after_each_epoch":
        source.lacks(key, "evaluation after each epoch: say a number of steps", changes_result=False)
        return {}
    found = {"trainer.eval_every": shared.interval(source, key) if source.items("data.val_files") else 0}
    return found | shared.validation_rows(source, "data.val_max_samples")


def say_which_entropy(source: Source) -> dict[str, Any]:
    """Name the older default of a coefficient that is left out, where no key shows that the configuration is a later one."""
    key, programs = "actor_rollout_ref.actor.entropy_coeff", (None, "verl.trainer.main_ppo", *_DAPO)
    is_of_then = source.settings.get("-m") in programs and all(
        name in _OF_2025_04 for name in source.settings if name != "-m"
    )
    if is_of_then and not source.has(key) and not source.number(key):
        source.note(f"{key} is left out: 0, as in verl since 2025-04-17; it was 0.001 before, with --from verl@2025-04")
    return {}


def profiler(source: Source) -> dict[str, Any]:
    asked = any(source.flag(f"actor_rollout_ref.{role}.profiler.enable") for role in ("actor", "rollout", "ref"))
    if (steps := source.items("global_profiler.steps")) and asked and source.text("global_profiler.tool") == "torch":
        return {"trainer.profile.steps": [int(step) for step in steps]}
    return {}


tracked = shared.tracked("trainer.logger", "trainer.project_name", "trainer.experiment_name")

DERIVED = (
    program,
    advantage,
    loss,
    kl,
    correction,
    overlong,
    dynamic_sampling,
    batch,
    overlong_prompts,
    template,
    layout,
    megatron,
    low_rank,
    further_tokens,
    dtypes,
    memory,
    micro_batch,
    optimizer,
    critic,
    reference,
    sampling,
    engine,
    router_replay,
    evaluation,
    rewards,
    megatron_checkpoints,
    run,
    length_of_run,
    evaluation_interval,
    profiler,
    say_which_entropy,
    tracked,
    verl_prime.prime,
    verl_older.older,
    verl_older.rows,
)

TABLE = Table(
    "verl",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    versions=VERSIONS,
    release_of=release_of,
    known=known("verl"),
    command=(
        "`fivefold train --from verl KEY=VALUE ...`: the arguments of `python3 -m verl.trainer.main_ppo` as "
        "they are, `--config-name` "
        "included, or the script that has them: `fivefold train --from verl run.sh`."
    ),
    loses=("tools, several turns, images",),
    gains=(
        "a batch vocabulary that is printed before the run starts",
        "numbers that no layout, no micro-batch and no number of GPUs changes",
        "checkpoints that any layout resumes",
        "every key that is read, or refused",
    ),
)


OTHER_TABLES = (verl_sft.TABLE,)
_PROGRAMS = verl_async.DEFAULTS | {verl_prime.PROGRAM: verl_prime.DEFAULTS} | _DAPO
_OWN_DEFAULTS = {program: replace(TABLE, defaults=DEFAULTS | own) for program, own in _PROGRAMS.items()}
"""Tables of programs whose configuration has other defaults."""


MEGATRON = replace(TABLE, versions=MEGATRON_VERSIONS)
"""The table of ppo_megatron_trainer.yaml, which had other defaults in older releases."""


def table_of(settings: Mapping[str, Any]) -> Table:
    """The table of a program's settings: PPO's, or that of the SFT trainers."""
    is_rl = any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings)
    if (own := _OWN_DEFAULTS.get(str(settings.get("-m")))) is not None:
        return own
    if "ppo_megatron_trainer" in str(settings.get("--config-name")):
        return MEGATRON
    if not is_rl and verl_sft.looks_like(settings):
        return verl_sft.table_of(settings)
    return TABLE


translate = dialect(table_of)
