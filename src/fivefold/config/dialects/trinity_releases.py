"""Trinity-RFT's older releases: names of then -> those of today, and the release that a configuration is written for.

What their code explains was read in Trinity-RFT e4a356b to 732d801 (2025-04-24 to 2025-06-05), d9d2135 (2025-11-19) and
ad80580 (2026-02-05). A setting that says the same by another name is moved; one that means something else stays where it
stands and is read by trinity_algorithm.py as that release read it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fivefold.config.dialects import Outcome, Translation, Tree
from fivefold.config.dialects.source import flatten
from fivefold.config.dialects.trinity_keys import BUFFER, CRITIC, ROLLOUT, TASKSET, VERL

RELEASE = "release"
"""A default that no configuration can set: the month of the release that it is read as."""
VERSIONS: dict[str, dict[str, Any]] = {}
"""Month of an older release -> defaults that were others then."""
VERSIONS["2026-06"] = {CRITIC + "optim.lr": 1e-5, CRITIC + "cliprange_value": 0.5}
"""0.6.0 with verl 0.8, which builds verl's configuration again (trainer/verl/config.py)."""
VERSIONS["2026-02"] = {RELEASE: "2026-02", "algorithm.optimizer.min_lr_ratio": 0.0}
VERSIONS["2026-01"] = {**VERSIONS["2026-02"], RELEASE: "2026-01", "model.enable_thinking": False}
VERSIONS["2025-11"] = {**VERSIONS["2026-01"], RELEASE: "2025-11", "algorithm.policy_loss_fn_args.clip_ratio_c": None}
VERSIONS["2025-09"] = {**VERSIONS["2025-11"], RELEASE: "2025-09", "cluster.gpu_per_node": 8}
VERSIONS["2025-05"] = {**VERSIONS["2025-09"], RELEASE: "2025-05", "model.max_prompt_tokens": 2048}
VERSIONS["2025-05"] |= {
    "model.max_response_tokens": 2048,
    "explorer.eval_on_startup": False,
    "algorithm.gamma": f"${{{VERL}algorithm.gamma}}",
    "algorithm.lam": f"${{{VERL}algorithm.lam}}",
    VERL + "algorithm.gamma": 1.0,
    VERL + "algorithm.lam": 1.0,
}
VERSIONS["2025-04"] = {**VERSIONS["2025-05"], RELEASE: "2025-04", "model.enable_thinking": None}
VERSIONS["2025-04"] |= {
    TASKSET + "rollout_args.temperature": 0.0,
    "trainer.save_interval": f"${{{VERL}trainer.save_freq}}",
    VERL + "trainer.save_freq": 0,
}
FIRST = ("2025-04", "2025-05")
"""Releases whose loss was told by verl's keys alone."""


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
"""Key of before -> that of today; the first of several that are there."""
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
"""Release -> whether keys that only it and those before it have are set, the oldest that fits first."""


_EVALUATED = "buffer.explorer_input.eval_tasksets"


def release_of(tree: Tree) -> str:
    """The release that the keys' names tell of; empty for one of which they tell nothing, which is today's."""
    # Keys that are kept for older configurations are empty in later ones.
    keys = [key for key, value in flatten(tree) if value not in (None, "", {})]
    return next((release for release, is_of in _SIGNS if is_of(keys)), "")


def moved(tree: Tree) -> tuple[Tree, dict[str, str]]:
    """The tree with today's names, and name of today -> name of then where they differ."""
    if "actor_rollout_ref" in tree:
        return tree, {}
    tree = copy.deepcopy(tree)
    names: dict[str, str] = {}
    _expert(tree)
    there = dict(flatten(tree))
    path, split = there.get("data.dataset_path"), there.get("data.eval_split")
    if path and split:
        remove(tree, "data.eval_split")
        _put(tree, _EVALUATED, [{"path": path, "split": split}])
        names[_EVALUATED] = "data.eval_split"
    for old, new in _MOVED.items():
        if old in there and there.get(new) is None and new not in names:
            names[new] = old
            remove(tree, old)
            _put(tree, new, there[old])
    return tree, names


def _expert(tree: Tree) -> None:
    """The expert's data of mix, which was sft_warmup_dataset until 2025-10."""
    buffer, algorithm = tree.get("buffer"), tree.get("algorithm")
    inputs = buffer.get("trainer_input") if isinstance(buffer, dict) else None
    mixes = isinstance(algorithm, dict) and str(algorithm.get("algorithm_type")).startswith("mix")
    if mixes and isinstance(inputs, dict) and "sft_warmup_dataset" in inputs:
        inputs.setdefault("auxiliary_buffers", {})["sft_dataset"] = inputs.pop("sft_warmup_dataset")


def remove(tree: Tree, key: str) -> None:
    """Remove a key that is set, and the sections that it leaves empty."""
    *parents, last = key.split(".")
    nodes = [tree]
    for name in parents:
        nodes.append(nodes[-1][name])
    del nodes[-1][last]
    for name, above, below in zip(reversed(parents), reversed(nodes[:-1]), reversed(nodes[1:]), strict=True):
        if not below:
            del above[name]


def _put(tree: Tree, key: str, value: Any) -> None:
    """Set a key."""
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = value


def named(translation: Translation, names: dict[str, str]) -> Translation:
    """The same with the names that the configuration has."""

    def of(each: Outcome) -> Outcome:
        return replace(each, key=names.get(each.key, each.key))

    return replace(
        translation,
        keys={names.get(key, key): text for key, text in translation.keys.items()},
        lines=[replace(each, sources=tuple(names.get(key, key) for key in each.sources)) for each in translation.lines],
        outcomes=[of(each) for each in translation.outcomes],
    )
