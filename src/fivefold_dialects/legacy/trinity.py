"""Rename keys of Trinity-RFT's older releases to today's, and recognize the release that a configuration is written for.

Source: Trinity-RFT e4a356b to 732d801 (2025-04-24 to 2025-06-05), d9d2135 (2025-11-19) and ad80580 (2026-02-05). A setting
with the same meaning and another name is renamed. One with another meaning keeps its name; the functions at the end of this
file read it as that release did, and trinity.yaml has its row.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.dialect import Outcome, Translation, Tree
from fivefold.config.loader import read
from fivefold_dialects.source import Source, flatten
from fivefold_dialects.trinity_keys import ACTOR, BUFFER, CRITIC, EVALUATED, ROLLOUT, TASKSET, VERL

RELEASE = "release"
"""Internal key that no configuration can set: the month of the release that the configuration is read as."""
FIRST = ("2025-04", "2025-05")
"""Releases in which only verl's keys configure the loss."""


def _section(old: str, new: str, names: str) -> dict[str, str]:
    return {old + name: new + name for name in names.split()}


_MOVED = {
    "data.total_epochs": "buffer.total_epochs",
    "data.total_epoch": "buffer.total_epochs",
    "data.batch_size": "buffer.batch_size",
    "data.dataset_path": TASKSET + "path",
    "data.train_split": TASKSET + "split",
    "data.dataset_config.split": TASKSET + "split",
    "data.subset_name": TASKSET + "subset_name",
    "data.format_config.prompt_key": TASKSET + "format.prompt_key",
    "data.format_config.response_key": TASKSET + "format.response_key",
    **_section("data.", "buffer.explorer_input.", "default_workflow_type default_reward_fn_type"),
    **_section(
        "data.",
        "data_processor.",
        "data_workflow_url dj_config_path dj_process_desc agent_model_name agent_model_config.config_name "
        "agent_model_config.model_type agent_model_config.model_name agent_model_config.api_key clean_strategy "
        "min_size_ratio min_priority_score priority_weights data_dist db_url max_retry_times max_retry_interval",
    ),
    **_section("global_config.", "buffer.", "total_epochs total_steps batch_size"),
    "global_config.eval_interval": "explorer.eval_interval",
    "global_config.eval_on_latest_ckp": "explorer.bench_on_latest_checkpoint",
    "global_config.algorithm_type": "algorithm.algorithm_type",
    "trainer.algorithm_type": "algorithm.algorithm_type",
    "trainer.eval_interval": "explorer.eval_interval",
    "trainer.sft_warmup_iteration": "trainer.sft_warmup_steps",
    "synchronizer.sync_iteration_interval": "synchronizer.sync_interval",
    "monitor.project": "project",
    "monitor.name": "name",
    "monitor.cache_root_dir": "monitor.cache_dir",
    "explorer.repeat_times": "algorithm.repeat_times",
    TASKSET + "rollout_args.repeat_times": "algorithm.repeat_times",
    TASKSET + "subset": TASKSET + "subset_name",
    **_section("algorithm.add_strategy_args.", "algorithm.advantage_fn_args.", "baseline_shift tau opmd_baseline epsilon"),
    "algorithm.advantage_fn_args.asymre_baseline_shift": "algorithm.advantage_fn_args.baseline_shift",
    **_section(
        "explorer.",
        ROLLOUT,
        "engine_type engine_num tensor_parallel_size enable_prefix_caching enforce_eager dtype seed use_v1 "
        "gpu_memory_utilization enable_chunked_prefill chat_template bundle_indices",
    ),
    "explorer.enable_chunked_prefil": ROLLOUT + "enable_chunked_prefill",
    **_section("explorer.", TASKSET + "rollout_args.", "temperature top_p top_k logprobs"),
    **_section("buffer.train_dataset.", BUFFER, "name storage_type path"),
    **_section(
        "buffer.train_dataset.kwargs.", BUFFER + "format.", "prompt_type prompt_key response_key chosen_key rejected_key"
    ),
    "trainer.ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
}
"""Older key -> today's key; the first older key that is set counts."""
_SIGNS: tuple[tuple[str, Callable[[Iterable[str]], bool]], ...] = (
    ("2025-05", lambda keys: any(key.startswith("global_config.") for key in keys)),
    (
        "2025-04",
        lambda keys: any(key.startswith(("data.batch_size", "data.dataset_path", "data.total_epoch")) for key in keys),
    ),
    (
        "2025-09",
        lambda keys: any(
            key in ("trainer.trainer_config_path", "explorer.runner_num", "buffer.max_retry_times", "algorithm.add_strategy")
            or key.startswith(("trainer.actor_", "trainer.sft_warmup", "buffer.trainer_input.sft_warmup"))
            or key.startswith((BUFFER + "use_priority_queue", BUFFER + "replay_buffer_kwargs."))
            for key in keys
        ),
    ),
    ("2025-11", lambda keys: "trainer.ppo_max_token_len_per_gpu" in keys),
)
"""(release, function that tests for keys which only this and earlier releases have); the first match counts."""


def release_of(tree: Tree) -> str:
    """Return the release that the keys' names show; "" for the current release."""
    # Later configurations may still have older keys, which are empty.
    keys = [key for key, value in flatten(tree) if value not in (None, "", {})]
    return next((release for release, is_of in _SIGNS if is_of(keys)), "")


def _second_file(path: str) -> Tree:
    """Return the settings of verl's own file, with references (`${critic.optim.lr}`) changed to their place below VERL."""
    whole = read(path)

    def moved_below(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved_below(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved_below(item) for item in value]
        if not isinstance(value, str):
            return value
        return re.sub(r"\$\{(\w+)(?=[.}])", lambda name: f"${{{VERL if name[1] in whole else ''}{name[1]}", value)

    return {key: moved_below(value) for key, value in whole.items()}


def with_second_file(tree: Tree) -> Tree:
    """Return the settings together with those of the file `trainer.trainer_config_path`, if it exists."""
    trainer = tree.get("trainer")
    if not (isinstance(trainer, dict) and Path(str(trainer.get("trainer_config_path") or "")).is_file()):
        return tree
    inner = {**_second_file(str(trainer["trainer_config_path"])), **(trainer.get("trainer_config") or {})}
    rest = {key: value for key, value in trainer.items() if key != "trainer_config_path"}
    return {**tree, "trainer": {**rest, "trainer_config": inner}}


def moved(tree: Tree) -> tuple[Tree, dict[str, str]]:
    """Return the tree with today's names, and a mapping of today's names to the names in the configuration that differ."""
    if "actor_rollout_ref" in tree:
        return tree, {}
    tree = copy.deepcopy(tree)
    names: dict[str, str] = {}
    _expert(tree)
    there = dict(flatten(tree))
    path, split = there.get("data.dataset_path"), there.get("data.eval_split")
    if path and split:
        remove(tree, "data.eval_split")
        _put(tree, EVALUATED, [{"path": path, "split": split}])
        names[EVALUATED] = "data.eval_split"
    for old, new in _MOVED.items():
        if old in there and there.get(new) is None and new not in names:
            names[new] = old
            remove(tree, old)
            _put(tree, new, there[old])
    return tree, names


def _expert(tree: Tree) -> None:
    """Rename the expert's data set of mix, which was sft_warmup_dataset until 2025-10, in place."""
    buffer, algorithm = tree.get("buffer"), tree.get("algorithm")
    inputs = buffer.get("trainer_input") if isinstance(buffer, dict) else None
    mixes = isinstance(algorithm, dict) and str(algorithm.get("algorithm_type")).startswith("mix")
    if mixes and isinstance(inputs, dict) and "sft_warmup_dataset" in inputs:
        inputs.setdefault("auxiliary_buffers", {})["sft_dataset"] = inputs.pop("sft_warmup_dataset")


def remove(tree: Tree, key: str) -> None:
    """Remove a key that is set, and sections that are then empty."""
    *parents, last = key.split(".")
    nodes = [tree]
    for name in parents:
        nodes.append(nodes[-1][name])
    del nodes[-1][last]
    for name, above, below in zip(reversed(parents), reversed(nodes[:-1]), reversed(nodes[1:]), strict=True):
        if not below:
            del above[name]


def _put(tree: Tree, key: str, value: Any) -> None:
    """Set a full key in a nested tree."""
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = value


def named(translation: Translation, names: dict[str, str]) -> Translation:
    """Return the translation with the names that the configuration uses."""

    def of(outcome: Outcome) -> Outcome:
        return replace(outcome, key=names.get(outcome.key, outcome.key))

    return replace(
        translation,
        keys={names.get(key, key): text for key, text in translation.keys.items()},
        lines=[
            replace(outcome, sources=tuple(names.get(key, key) for key in outcome.sources)) for outcome in translation.lines
        ],
        outcomes=[of(outcome) for outcome in translation.outcomes],
    )


_EARLY = {
    "use_kl_loss": ("use_kl_loss", False),
    "kl_loss_coef": ("kl_loss_coef", 0.001),
    "entropy_coef": ("entropy_coeff", 0.001),
    "clip_ratio": ("clip_ratio", 0.2),
}
"""Name of trainer.actor_* before 2025-06 -> verl's key that it overrode, and the default (verl_config.py)."""
_OF_VERL = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforceplusplus"}
"""verl's adv_estimator -> Trinity's advantage_fn."""


def early(source: Source) -> dict[str, Any]:
    """Return the numbers of the loss from keys before 2025-06; empty if the configuration has none of them."""
    if source.text(RELEASE) not in FIRST and not any(source.has(f"trainer.actor_{name}") for name in _EARLY):
        return {}
    ours: dict[str, Any] = {}
    for name, (of_verl, usual) in _EARLY.items():
        places = [key for key in (f"trainer.actor_{name}", ACTOR + of_verl) if source.value(key) is not None]
        read = source.flag if usual is False else source.number
        ours[name] = read(places[0]) if places else usual
    return ours


def advantage(source: Source, kind: str) -> str | None:
    """Return the advantage_fn from verl's key, for the release where algorithm_type set only the loss (ray_trainer.py,
    compute_advantage); None for others."""
    if source.text(RELEASE) != "2025-04" or kind not in ("ppo", "grpo"):
        return None
    key = VERL + "algorithm.adv_estimator"
    estimator = source.text(key) or "gae"
    if estimator not in _OF_VERL or (kind == "grpo" and source.has(key) and estimator != "grpo"):
        source.lacks(key, f"the advantage {estimator} with the algorithm {kind}")
    return "grpo" if kind == "grpo" else _OF_VERL.get(estimator, "ppo")


def opmd(source: Source) -> tuple[Source, float] | None:
    """Return the section of OPMD's baseline before 2025-06 and its default temperature; None for later releases."""
    is_old = early(source) and not source.keys("algorithm.advantage_fn_args.")
    return (source.under(ACTOR), 0.001) if is_old else None


def bounds(source: Source, ours: dict[str, Any]) -> dict[str, Any]:
    """Return our keys of the loss for numbers that policy_loss_fn_args leaves out."""
    arguments = source.under("algorithm.policy_loss_fn_args.")
    if ours["surrogate"] == "opmd" and not arguments.has("tau"):
        return {"tau": source.number(ACTOR + "tau") if source.has(ACTOR + "tau") else 0.001}
    if ours["surrogate"] != "ppo_clip" or arguments.has("clip_range"):
        return {}
    ratio = early(source)["clip_ratio"]
    return {f"clip_{side}": ratio for side in ("low", "high") if not arguments.has(f"clip_range_{side}")}


def penalty(source: Source, section: str) -> tuple[str, float | None, Source, bool] | None:
    """Return one of the two KL penalties, in the loss or in the reward as in verl (verl_trainer.py, train_rft_iteration).

    It is (estimator, coefficient, section with its target, whether it adapts to the target); None for later releases.
    """
    if not (before := early(source)):
        return None
    if section == "kl_loss_fn":
        coef = before["kl_loss_coef"] if before["use_kl_loss"] else 0.0
        return source.text(ACTOR + "kl_loss_type") or "low_var_kl", coef, source, False
    control = source.under(VERL + "algorithm.kl_ctrl.")
    coef = 0.0 if before["use_kl_loss"] else control.number("kl_coef") if control.has("kl_coef") else 0.001
    return source.text(VERL + "algorithm.kl_penalty") or "kl", coef, control, control.text("type") == "adaptive"


def pairs(source: Source, kind: str) -> dict[str, int]:
    """Return our key for two updates per step if a DPO pair counts twice, as until 2025-05 (verl_config.py,
    synchronize_config)."""
    return {"algorithm.updates_per_step": 2} if kind == "dpo" and source.has(ACTOR + "alg_type") else {}


def engine_first(source: Source) -> bool:
    """Return whether the engine's length limits override the model's (config.py, check_and_update)."""
    return source.text(RELEASE) in (*FIRST, "2025-09")


def critic_updates(source: Source) -> None:
    """Refuse several updates of the critic per policy update: before 2025-05-15 its mini-batch counted samples, the policy's
    counted prompts (fsdp_workers.py:867)."""
    if source.text(RELEASE) != "2025-04":
        return
    key, group = CRITIC + "ppo_mini_batch_size", source.whole("algorithm.repeat_times") or 1
    if source.count("buffer.batch_size") * group > (source.whole(key) or 0):
        source.lacks(key, "several updates of the critic next to one of the policy: until 2025-05 it counted samples")
