"""Recognize AReaL's releases before 2026, and translate its programs before 2025-08, which had another trainer (realhf).

`today` in areal_ppo.yaml and areal_sft.yaml maps today's keys to older keys with the same meaning, so today's functions read
them. Other behavior was read in AReaL c0ae64f70 (2025-11-13, under realhf/); comments and notes cite the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.source import Source
from fivefold_dialects.table import Derived, Table, defaults_of, load, table

_GONE = (
    "actor.group_adv_norm",
    "actor.group_reward_norm",
    "actor.context_length",
    "weight_update_mode",
    "server_only",
    "train_dataset.reward_fn",
)
_GONE_BELOW = re.compile(r"checkpointer\..*|.*\.(max_tokens_per_gpu|ulysses_sp_size|init_critic_from_actor|ds_auto_tp\..*)")


def release_of(settings: Mapping[str, Any]) -> str:
    """Return the month, one of `versions`, of the last release that the configuration fits; "" if it fits today's.

    Some keys show a release before 2025-10-16. A layout with dots was replaced on 2025-11-13; such configurations get the
    current optimizer, which the last four weeks of these releases had.
    """
    if any(key in _GONE or _GONE_BELOW.fullmatch(key) for key in settings) or isinstance(
        settings.get("actor.adv_norm"), bool
    ):
        return "2025-09"
    dots = re.match(r"['\"]?(sglang|vllm)\.", str(settings.get("allocation_mode") or ""))
    return "2025-11" if dots else ""


_FLAGS = ("actor.group_adv_norm", "actor.group_reward_norm")


def is_flagged(source: Source) -> bool:
    """Return whether normalizations are true or false, as until 2025-09, instead of sections."""
    return any(source.has(key) for key in _FLAGS) or (source.has("actor.adv_norm") and source.value("actor.adv_norm") != {})


def flagged(source: Source) -> dict[str, Any]:
    """Return our keys of normalization until 2025-09: adv_norm, on by default, is over the tokens of the step or of each
    group (actor.py of f52e58e1)."""
    if not is_flagged(source):
        return {}
    ours: dict[str, Any] = {}
    if source.has("actor.group_reward_norm") and source.flag("actor.group_reward_norm"):
        ours |= {"advantage": "group", "normalize": "group"}
    of_group = source.has("actor.group_adv_norm") and source.flag("actor.group_adv_norm")
    if of_group or not source.has("actor.adv_norm") or source.flag("actor.adv_norm"):
        ours |= {"whiten": True} | ({"whiten_by": "group"} if of_group else {})
    return {f"algorithm.{key}": value for key, value in ours.items()}


_CRITIC = "a critic whose values are normalized by a running mean: set ppo.disable_value=true to train without a critic"
_REWARDS = {"math": {"math_any": 1.0}, "stem": {"math_any": 1.0}, "code": {"code": 1.0}}
"""Value of the column `task` -> our rewards (math_code_dataset.py:90, math_rw_interface.py:104)."""

_ASYNCHRONOUS = ("max_head_offpolicyness", "max_concurrent_rollouts", "n_rollout_workers", "flush_request_timeout")
"""Keys that only main_async_ppo.py reads."""


def advantage(source: Source) -> dict[str, Any]:
    ppo = source.under("ppo.")
    if not ppo.flag("disable_value"):
        ppo.lacks("disable_value", _CRITIC)
    ours: dict[str, Any] = {
        "name": "grpo",
        "advantage": "reward",
        "normalize": "none",
        "whiten": ppo.flag("adv_norm"),
        "overlong_filter": source.flag("mask_too_long"),
    }
    if source.flag("group_adv_norm"):
        ours["whiten_by"] = "group"
    if not ours["whiten"]:
        ppo.lacks("adv_norm", "rewards of -1 and 1 without normalization: only their difference is kept here")
    if (ppo.number("early_stop_imp_ratio") or 0.0) < 5.0:
        ppo.lacks("early_stop_imp_ratio", "micro-batches that are skipped when ratios are large")
    return {f"algorithm.{key}": value for key, value in ours.items()}


def dynamic_sampling(source: Source) -> dict[str, Any]:
    """Return our key of dynamic sampling if the bounds drop exactly the prompts that all or no responses solve."""
    if not any(source.has(key) for key in _ASYNCHRONOUS):
        return {}
    low, high = source.number("success_rate_lb") or 0.0, source.number("success_rate_ub")
    high, one = 1.0 if high is None else high, 1 / source.count("group_size")
    if low <= 0 and high >= 1:
        return {}
    if not (0 < low <= one and 1 - one <= high < 1):
        source.lacks("success_rate_lb", f"a filter of prompts by their share of solved responses, {low:g} to {high:g}")
    return {"algorithm.dynamic_sampling": True}


def unbounded(source: Source) -> dict[str, Any]:
    """Return our keys of the weight of tokens, which has no bound without a cap; with one it is as in today's releases."""
    if not source.flag("actor.use_decoupled_loss") or source.number("actor.behav_imp_weight_cap") is not None:
        return {}
    return {f"algorithm.rollout_correction.{key}": value for key, value in {"weight": "token", "high": 1e9}.items()}


def precision(source: Source) -> dict[str, Any]:
    """Return our keys of data types: training uses float16 unless bf16 is set, the engine its own dtype."""
    trains = "bfloat16" if source.flag("actor.bf16") else "float16"
    ours: dict[str, Any] = {"policy.dtype": trains}
    name = "actor.vllm.dtype" if (source.text("allocation_mode") or "").startswith("vllm") else "actor.sglang.dtype"
    samples = source.text(name) or trains
    if samples not in ("auto", *shared.DTYPES):
        source.lacks(name, f"sampling in {samples}")
    elif samples != "auto" and shared.DTYPES[samples] != trains:
        ours["engine.dtype"] = shared.DTYPES[samples]
    return ours | (loss_scale(source, "actor.optimizer.") if trains == "float16" else {})


def loss_scale(source: Source, start: str) -> dict[str, Any]:
    """Return our keys of how a float16 loss is scaled."""
    ours = {name: source.number(start + name) for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window")}
    ours["hysteresis"] = int(source.number(f"{start}hysteresis") or 0)
    return {f"policy.megatron.optimizer.{name}": value for name, value in ours.items()}


def rewards(source: Source) -> dict[str, Any]:
    """Return our keys of rewards: a row's task chooses the verifier; normalization makes -1 and 1 equal to our 0 and 1."""
    return {
        "reward.functions": {"math_any": 1.0},
        "reward.by_source": _REWARDS,
        "data.source_key": "task",
        "data.apply_chat_template": False,
        "data.ground_truth_key": "solutions",
        "data.ground_truth_by_source": {"code": "input_output"},
    }


def imitation_precision(source: Source) -> dict[str, Any]:
    """Return our keys of the data type in SFT: float16 unless bf16 is set."""
    if source.flag("model.bf16"):
        return {"policy.dtype": "bfloat16"}
    return {"policy.dtype": "float16", **loss_scale(source, "model.optimizer.")}


def rows(source: Source) -> dict[str, Any]:
    """Return our keys of the columns: prompt and answer are joined without a template (prompt_answer_dataset.py:41)."""
    return {"data.apply_chat_template": False, "data.prompt_key": "prompt", "data.response_key": "answer"}


def tables(
    today: Table, ppo: tuple[Derived, ...], sft: tuple[Derived, ...], run: tuple[Derived, ...]
) -> tuple[Table, Table]:
    """Return the tables of the older programs for PPO and for SFT; the arguments are today's table and its functions."""
    tables = []
    of_these = (precision, advantage, dynamic_sampling, unbounded, rewards)
    for name, derived in (("ppo", (*ppo, *of_these, *run)), ("sft", (*sft, imitation_precision, rows, *run))):
        content = load(f"legacy/areal_{name}")
        elsewhere = {**dict.fromkeys(today.exact), **today.defaults, **defaults_of(content["today"])}
        tables.append(table(content, derived, elsewhere=elsewhere))
    return tables[0], tables[1]


def chosen(settings: Mapping[str, Any], today: Table, ppo: Table, sft: Table) -> Table:
    """Return the table of the program that the settings belong to, by a section, or by a model's family as its class."""
    if "model.path" in settings and any(key.startswith("exp_ctrl.") for key in settings):
        return sft
    is_older = any(key.startswith(("ppo.", "exp_ctrl.")) or key.endswith(".type._class") for key in settings)
    return ppo if is_older else today
