"""Translate AReaL: YAML and `key=value`, with layouts as strings: one per role today, before that `allocation_mode`.

Behavior that only AReaL's code defines was read in AReaL 4aef98d8d (2026-05-21); comments and notes cite the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fivefold_dialects import areal_method as method
from fivefold_dialects import areal_placement as placement
from fivefold_dialects import shared
from fivefold_dialects.areal_method import FIELDS, credit
from fivefold_dialects.areal_placement import is_dpo, is_sampled, is_sft, roles, trained, trainer
from fivefold_dialects.known import known
from fivefold_dialects.legacy import areal as legacy
from fivefold_dialects.source import Source
from fivefold_dialects.system import System
from fivefold_dialects.table import Table, load, table, when

GSM8K = "data/gsm8k-areal"
"""Directory that `fivefold data gsm8k --form areal` writes: GSM8K with AReaL's own prompts."""


def is_gsm8k(path: str | None) -> bool:
    """Return whether a path is GSM8K's name on the hub, whose rows AReaL's own code makes (areal/dataset/gsm8k.py)."""
    return path is not None and "gsm8k" in path and bool(re.fullmatch(r"[\w-]+/[\w-]+", path)) and not Path(path).exists()


def files_of(split: str, source: Source, key: str) -> list[str] | None:
    """Return the paths of a key; for GSM8K's name on the hub, the file that `fivefold data gsm8k` writes."""
    return [f"{GSM8K}/{split}.parquet"] if is_gsm8k(source.text(key)) else source.files(key)


def model(source: Source) -> dict[str, Any]:
    role = source.under(f"{trainer(source)}.")
    ours: dict[str, Any] = {"model.path": role.path("path")}
    tokenizer = source.text("tokenizer_path")
    if tokenizer and tokenizer != ours["model.path"]:
        ours["model.tokenizer"] = tokenizer
    if (dtype := shared.dtype(role, "dtype")) not in (None, "bfloat16"):
        ours["policy.dtype"] = dtype
    recomputes, is_megatron = role.flag("gradient_checkpointing"), roles(source)[0].backend == "megatron"
    if recomputes:
        ours |= shared.recompute(role, "megatron", "policy") if is_megatron else {"policy.recompute": "full"}
    if is_megatron:
        ours |= shared.options_of("ddp", role.under("megatron.ddp."), "policy") | FIELDS["megatron"](role.under("megatron."))
    ours |= (stages := shared.virtual_stages(role, "policy", "megatron.virtual_pipeline_parallel_size"))
    if source.flag("rollout.return_routed_experts"):
        ours |= shared.replayed("R3")
    ours |= FIELDS["deterministic"](role)
    splits = trained(source, roles(source)[0]).backend == "megatron"
    if role.flag("offload") or (splits and role.flag("fsdp.offload_params")):
        ours |= {"policy.offload.parameters": True, "policy.offload.optimizer": True}
    elif role.flag("optimizer.offload"):
        ours["policy.offload.optimizer"] = True
    if role.text("megatron.bridge_type") == "megatron-bridge":
        lacks = "adapters" if role.flag("use_lora") else "virtual stages" if stages else None
        ours |= shared.bridge(role, "megatron.bridge_type", "megatron-bridge", "policy", lacks)
    return ours


def longest(source: Source) -> tuple[int, int]:
    """Return the longest (prompt, response) in tokens."""
    if not is_sampled(source):
        length = source.whole("train_dataset.max_length") or 1024
        return length, length
    response = source.count("gconfig.max_new_tokens")
    return source.whole("train_dataset.max_length") or max(1, source.count("gconfig.max_tokens") - response), response


def data(source: Source) -> dict[str, Any]:
    prompt, response = longest(source)
    role = source.under(f"{trainer(source)}.")
    budget = role.whole("mb_spec.max_tokens_per_mb")
    ours: dict[str, Any] = {
        "data.max_prompt_tokens": prompt,
        "data.max_response_tokens": response,
        # The two responses of a pair are computed together.
        "policy.tokens_per_micro_batch": max(budget or 0, (prompt + response) * (2 if is_dpo(source) else 1)),
    }
    ours |= {"data.prompts_per_step": source.count("train_dataset.batch_size")}
    if is_dpo(source):
        return ours | {"algorithm.name": "dpo", "algorithm.updates_per_step": 1, "data.apply_chat_template": False}
    if is_sft(source):
        ours |= {"algorithm.name": "sft", "data.overlong_prompts": "refuse"}
        if is_gsm8k(source.text("train_dataset.path")):
            # The sequence is the question's text, directly followed by the solution.
            ours |= {"data.prompt_key": "extra_info.question", "data.apply_chat_template": False}
        return ours
    updates = source.count("actor.ppo_n_minibatches")
    if source.count("train_dataset.batch_size") % updates:
        source.lacks("actor.ppo_n_minibatches", "updates of unequal size: train_dataset.batch_size is no multiple of it")
    return ours | {"algorithm.updates_per_step": updates}


def sampling(source: Source) -> dict[str, Any]:
    gconfig = source.under("gconfig.")
    kept = gconfig.top_k("top_k")
    return FIELDS["sampling"](source) | {
        # A top_k above every vocabulary size is no bound.
        "engine.sampling.top_k": 0 if kept >= 1_000_000 else kept,
        "engine.sampling.stop_token_ids": [int(token) for token in gconfig.numbers("stop_token_ids")] or None,
    }


def interval(source: Source, start: str) -> int | Literal["epoch"]:
    """Return the steps between two events, or `epoch`; 0 means never. AReaL can combine intervals, we support only one."""
    section = source.under(start)
    steps, epochs = section.whole("freq_steps") or 0, section.whole("freq_epochs") or 0
    if epochs > 1 or (epochs and steps):
        reason = "together with freq_steps" if steps else f"every {epochs} epochs: set 1, or a number of freq_steps"
        section.lacks("freq_epochs", reason, changes_result=False)
    return steps or ("epoch" if epochs else 0)


def run(source: Source) -> dict[str, Any]:
    place = "/".join(filter(None, map(source.text, ("cluster.fileroot", "experiment_name", "trial_name"))))
    mode = (source.text("recover.mode") or "disabled").lower()
    found_again = mode not in ("disabled", "off")
    return FIELDS["run"](source) | {
        "trainer.run_dir": place,
        "trainer.ends_with_data": None if source.whole("total_train_steps") is None else True,
        "trainer.resume": "auto" if found_again else "never",
        "trainer.save_every": interval(source, "saver.") or (interval(source, "recover.") if found_again else 0),
        "trainer.eval_every": interval(source, "evaluator.") if source.text("valid_dataset.path") else 0,
    }


def tracked(source: Source) -> dict[str, Any]:
    """Return our keys of trackers; a tracker is off unless its mode is set, and takes project and name of the experiment."""
    at = "stats_logger."
    modes = {name: source.text(f"{at}{name}.mode") or "disabled" for name in ("wandb", "swanlab")}
    trackers = [name for name, mode in modes.items() if mode in ("online", "offline", "cloud", "local", "shared")]
    board = ["tensorboard"] if source.text(at + "tensorboard.path") else []
    if not trackers:
        return {"trainer.loggers": ["console", *board]}
    tracker = source.under(f"{at}{trackers[0]}.")
    return {
        "trainer.loggers": ["console", *board, *trackers],
        "tracking.project": tracker.text("project") or source.text("experiment_name"),
        "tracking.name": tracker.text("name") or source.text("trial_name"),
        "tracking.group": tracker.text("group"),
        "tracking.tags": tracker.texts("tags") or None,
        "tracking.offline": all(modes[name] in ("offline", "local") for name in trackers) or None,
    }


def discounted(source: Source) -> dict[str, Any]:
    return {f"algorithm.{key}": value for key, value in credit(source).items()}


_RUN = (model, data, run, tracked)
_PLACEMENT, _SAMPLING = (placement.ahead, placement.layout, *when(is_sampled, placement.engine)), when(is_sampled, sampling)
_LOSS = (*when(is_dpo, method.pairs), *when(is_sampled, method.loss), method.kl, *when(is_sampled, method.correction))
DERIVED = (
    *(*_PLACEMENT, method.low_rank, method.advantage, *when(is_sampled, legacy.flagged), *_LOSS, method.optimizer),
    *(method.critic, *_SAMPLING, *_RUN),
)
_CONVERTERS = {"train_files": partial(files_of, "train"), "test_files": partial(files_of, "test")}
TABLE = table("areal", DERIVED, _CONVERTERS, load("legacy/areal"), release_of=legacy.release_of, known=known("areal"))
_PPO = (*_PLACEMENT, discounted, *_LOSS, method.optimizer, *_SAMPLING)
PPO, SFT = legacy.tables(TABLE, ppo=_PPO, sft=(placement.layout, method.optimizer), run=_RUN)


def table_of(settings: Mapping[str, Any]) -> Table:
    """Return the table of the program that the settings belong to."""
    return legacy.chosen(settings, TABLE, PPO, SFT)


translate = System("areal", (TABLE, PPO, SFT), table_of)
