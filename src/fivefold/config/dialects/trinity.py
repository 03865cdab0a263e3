"""Trinity-RFT: YAML, `trinity run --config FILE`; an explorer that samples and a trainer (verl's) on GPUs of their own.

trinity_rows.py has what becomes of each key; what several of them say is divided by what it is about: trinity_algorithm.py,
trinity_steps.py (batches and steps), trinity_data.py (tasks and rewards), trinity_placement.py (GPUs and engine),
trinity_models.py (what is trained). Here is the run.
Numbers that only Trinity's code explains were read in Trinity-RFT 221b0759 and 9051d637; a note has the place.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.config.dialects import Translation, Tree, merged, shared
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.source import Source, flatten
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect
from fivefold.config.dialects.trinity_algorithm import algorithm, kl, loss, offline
from fivefold.config.dialects.trinity_data import data, lengths, sampled_evaluation
from fivefold.config.dialects.trinity_keys import ACTOR, CRITIC, MODEL, ROLLOUT, TASKSET, VERL
from fivefold.config.dialects.trinity_models import critic, epochs, layout, memory, optimizer, weights
from fivefold.config.dialects.trinity_placement import engine, low_rank
from fivefold.config.dialects.trinity_releases import FIRST, RELEASE, VERSIONS, moved, named, release_of, remove
from fivefold.config.dialects.trinity_rows import SECTIONS
from fivefold.config.dialects.trinity_rows_releases import SECTION as RELEASES
from fivefold.config.dialects.trinity_steps import ahead, batch, period, periods, replayed
from fivefold.config.loader import read

DEFAULTS: dict[str, Any] = {
    "mode": "both",
    "project": "Trinity-RFT",
    "name": "rft",
    "checkpoint_root_dir": "./checkpoints",
    "continue_from_checkpoint": True,
    "algorithm.algorithm_type": "ppo",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.policy_loss_fn_args.clip_ratio_c": 3.0,
    "algorithm.optimizer.lr": 1e-6,
    "algorithm.optimizer.lr_warmup_steps": -1,
    "algorithm.optimizer.lr_warmup_steps_ratio": 0.0,
    "algorithm.optimizer.min_lr_ratio": 0.01,
    "algorithm.optimizer.lr_scheduler_type": "constant",
    "algorithm.optimizer.betas": [0.9, 0.999],
    "algorithm.optimizer.weight_decay": 0.01,
    "algorithm.optimizer.clip_grad": 1.0,
    "model.temperature": 1.0,
    "model.top_p": 1.0,
    "model.top_k": -1,
    "cluster.node_num": 1,
    "cluster.gpu_per_node": 1,
    "buffer.batch_size": 1,
    "buffer.train_batch_size": 0,
    "buffer.total_epochs": 1,
    TASKSET + "format.prompt_key": "prompt",
    "explorer.eval_interval": 100,
    "explorer.eval_on_startup": True,
    ROLLOUT + "engine_num": 1,
    ROLLOUT + "tensor_parallel_size": 1,
    ROLLOUT + "gpu_memory_utilization": 0.9,
    "synchronizer.sync_interval": 1,
    "synchronizer.sync_offset": 0,
    "synchronizer.sync_style": "fixed",
    "trainer.save_interval": 0,
    "trainer.grad_clip": 1.0,
    "trainer.use_dynamic_bsz": True,
    "trainer.ulysses_sequence_parallel_size": 1,
    "trainer.trainer_strategy": "fsdp",
    "monitor.monitor_type": "tensorboard",
    ACTOR + "megatron.sequence_parallel": True,
    ACTOR + "ppo_micro_batch_size_per_gpu": 4,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    ACTOR + "ppo_epochs": 1,
    MODEL + "enable_gradient_checkpointing": True,
    CRITIC + "cliprange_value": 0.0,
    CRITIC + "ppo_epochs": 1,
    CRITIC + "optim.lr": 1e-6,
    CRITIC + "optim.betas": [0.9, 0.999],
    CRITIC + "optim.weight_decay": 0.01,
    CRITIC + "optim.clip_grad": 1.0,
    CRITIC + "model.enable_gradient_checkpointing": True,
}
HALVES = "explore and train"
"""The mode of two files that are one run."""


def _is_said(value: Any) -> bool:
    return value not in ("", None)


def _differ(one: Any, other: Any) -> bool:
    """What one of two files leaves empty the other says, and a path is the same with a slash behind it."""
    ends = [str(value).rstrip("/") for value in (one, other)]
    return _is_said(one) and _is_said(other) and one != other and ends[0] != ends[1]


def join(trees: list[Tree]) -> Tree:
    """Two files of which one explores and one trains are the run that `mode: both` makes of them, on the GPUs of both.

    With sync_style fixed the explorer waits for new weights after each sync_interval of its steps (explorer.py,
    _pull_latest_weights) and the trainer for its samples, so neither has a pace of its own. The explorer's section is that
    of its file, the trainer's and the cluster (the trainer's GPUs) those of the other; what both say they must say alike.
    """
    modes = {str(tree.get("mode")): tree for tree in trees}
    if len(trees) != 2 or set(modes) != {"explore", "train"}:
        return merged(trees)
    explorer, trainer = modes["explore"], modes["train"]
    own = ("mode", "explorer", "cluster", "trainer", "monitor", "log", "service", "ignore_validator_suggestions")
    shared_parts = [
        copy.deepcopy({key: value for key, value in each.items() if key not in own}) for each in (explorer, trainer)
    ]
    said, also = (dict(flatten(part)) for part in shared_parts)
    if differing := sorted(key for key in said.keys() & also.keys() if _differ(said[key], also[key])):
        first = differing[0]
        raise ValueError(
            f"the files of explorer and trainer must say the same of {', '.join(differing)}: "
            f"got {first}={said[first]} and {also[first]}"
        )
    of_trainer = {key: trainer[key] for key in own if key in trainer}
    for key in (key for key in said.keys() & also.keys() if not _is_said(also[key])):
        remove(shared_parts[1], key)
    return {**merged(shared_parts), **of_trainer, "explorer": explorer.get("explorer", {}), "mode": HALVES}


def program(source: Source) -> dict[str, Any]:
    mode = source.text("mode") or "both"
    if mode not in ("both", HALVES, "train") or (mode == "train" and not offline(source)):
        reason = "half of a run of two programs: give the other's file too" if mode in ("explore", "train") else mode
        source.lacks("mode", f"{reason}; a run samples and trains here (both), or learns from data (train with dpo or sft)")
    if mode == HALVES and source.text(RELEASE) in FIRST:
        source.lacks("mode", "an explorer that never waits for the trainer's weights (explorer.py of 2025-05, explore)")
    if source.text("trainer.trainer_config_path"):
        source.lacks("trainer.trainer_config_path", "settings in a second file: write them under trainer.trainer_config")
    return {}


def run(source: Source) -> dict[str, Any]:
    place = "/".join(filter(None, (source.text("checkpoint_root_dir"), source.text("project"), source.text("name"))))
    place = source.text("model.checkpoint_path") or place
    keep = source.whole("trainer.max_checkpoints_to_keep") or source.whole(VERL + "trainer.max_actor_ckpt_to_keep")
    key = "buffer.total_steps" if source.whole("buffer.total_steps") else "trainer.total_steps"
    steps = source.whole(key)
    if steps and steps % period(source):
        source.lacks(key, f"a run that ends between two syncs: say a multiple of sync_interval = {period(source)}")
    evaluated = bool(source.items("buffer.explorer_input.eval_tasksets")) and not offline(source)
    return {
        "trainer.run_dir": place,
        "trainer.keep": keep if keep and keep > 0 else EVERY_CHECKPOINT,
        "trainer.resume": "auto" if source.flag("continue_from_checkpoint") else "never",
        "trainer.save_every": periods(source, source.whole("trainer.save_interval")),
        "trainer.eval_every": periods(source, source.whole("explorer.eval_interval")) if evaluated else 0,
        "trainer.eval_before_train": source.flag("explorer.eval_on_startup") and evaluated,
        "trainer.steps": periods(source, steps) or None,
        "trainer.epochs": source.whole("buffer.total_epochs"),
        **(sampled_evaluation(source) if evaluated else {"eval.samples": 0}),
        "trainer.loggers": [
            "console",
            *(name for name in shared.loggers(source, "monitor.monitor_type") if name != "console"),
        ],
    }


tracked = shared.tracked("monitor.monitor_type", "project", "name", group="group")
DERIVED = (
    program,
    low_rank,
    ahead,
    replayed,
    layout,
    memory,
    lengths,
    batch,
    epochs,
    algorithm,
    loss,
    kl,
    optimizer,
    critic,
    weights,
    engine,
    data,
    run,
    tracked,
)
TABLE = Table(
    "Trinity-RFT",
    (*SECTIONS, RELEASES),
    DERIVED,
    DEFAULTS,
    elsewhere={RELEASE: None},
    versions=VERSIONS,
    command="`fivefold train --from trinity --config run.yaml`, as `trinity run --config run.yaml`.",
    loses=(
        "workflows with tools, environments and other models",
        "an explorer and a trainer that ask each other for weights (sync_style other than fixed)",
        "samples that are learned from again after some seconds, and operators on data",
    ),
    gains=(
        "no flash-attn, Apex or converter to install: mixture-of-experts models load from their Hugging Face directory",
        "a choice: GPUs of its own for sampling, or all GPUs for sampling and for training in turn",
        "every layout with the same numbers",
    ),
    known=known("trinity"),
)


def _second_file(path: str) -> Tree:
    """The settings of verl's own file, whose references (`${critic.optim.lr}`) begin at its own root."""
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


def translate(
    tree: Tree, overrides: list[str], environment: Mapping[str, str] | None = None, version: str = ""
) -> Translation:
    """Trinity-RFT's configuration in our spelling, with the file of `trainer.trainer_config_path` where it is here.

    It is read as one of the release that is named, or else of the one that its keys tell of.
    """
    version, trainer = version or release_of(tree), tree.get("trainer")
    if isinstance(trainer, dict) and Path(str(trainer.get("trainer_config_path") or "")).is_file():
        inner = {**_second_file(str(trainer["trainer_config_path"])), **(trainer.get("trainer_config") or {})}
        rest = {key: value for key, value in trainer.items() if key != "trainer_config_path"}
        tree = {**tree, "trainer": {**rest, "trainer_config": inner}}
    today, names = moved(tree)
    return named(dialect(TABLE)(today, overrides, environment, version), names)
