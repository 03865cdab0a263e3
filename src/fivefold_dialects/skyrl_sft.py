"""Translate SkyRL's SFT program `skyrl.train.main_sft`, which has its own flat keys.

Behavior that only its code defines was read in SkyRL a9564572e (2026-08-21); comments and notes cite the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold_dialects.skyrl_model import low_rank, optimizer, policy
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import choices, fields

CHOICES = choices("skyrl_sft")
PROGRAMS = ("main_sft", "main_sft_with_callbacks")
"""Supported programs; the second one also logs e to the power of the loss."""
_LONGEST = 1 << 20
"""Length limit in tokens for sequences without one."""


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings are those of the SFT program, by its name or by keys that only it has at the top level."""
    if (program := str(settings.get("-m", ""))) and "sft" in program:
        return True
    return not any(key.startswith(("trainer.", "generator.")) for key in settings) and any(
        key.startswith("train_dataset") or key in ("dataset_name", "dataset_split", "messages_key") for key in settings
    )


def program(source: Source) -> dict[str, Any]:
    name = (source.text("-m") or "main_sft").rpartition(".")[2]
    if name not in PROGRAMS:
        source.lacks("-m", "a program other than main_sft: it may do things that no key shows")
    return {"algorithm.name": "sft"}


def _slices(source: Source, key: str) -> list[str]:
    """Return a list of slices such as `[train[:100],train[100:]]`, whose brackets and colons YAML would misread."""
    raw = source.raw(key)
    if not isinstance(raw, str) or "[" not in raw.strip("'\" ")[1:]:
        return source.texts(key)
    inner = raw.strip("'\" ")
    inner = inner[1:-1] if inner.startswith("[") else inner
    return [part.strip("'\" ") for part in re.split(r",(?![^\[]*\])", inner)]


def _parts(source: Source, sets: str, splits: str, older_set: str, older_split: str) -> list[str]:
    """Return the files of data sets of the hub, as OWNER/NAME-SPLIT.parquet, with the rows of a slice."""
    if (source.has(older_set) or source.has(older_split)) and not source.has(sets):
        names, slices = source.texts(older_set), _slices(source, older_split)
    else:
        names, slices = source.texts(sets), _slices(source, splits)
    if not names:
        return []
    if len(names) != len(slices):
        raise UnreadableError(f"{splits} must have one entry for each of {sets}: got {len(slices)} for {len(names)}")
    files = []
    for name, split in zip(names, slices, strict=True):
        split_name, bracket, rows = split.partition("[")
        if bracket and (":" not in rows or not set(rows) <= set("-0123456789:]")):
            source.lacks(splits, f"the slice {split}: [begin:end] in rows is read")
        files.append(f"{name}-{split_name}.parquet{bracket}{rows}")
    return files


def data(source: Source) -> dict[str, Any]:
    train = _parts(source, "train_datasets", "train_dataset_splits", "dataset_name", "dataset_split")
    if len(train) > 1:
        reason = "rows of several sets, drawn with replacement by weight: data.mixture has fixed shares"
        source.lacks("train_datasets", reason)
    if (order := source.text("sampler")) not in ("random", "sequential"):
        source.lacks("sampler", "your own order of rows")
    if (longest := source.whole("max_length")) is None:
        source.lacks("max_length", "sequences without a length limit: set max_length")
    ours = {
        "data.train": train,
        "data.shuffle": order == "random",
        "data.learned_turns": CHOICES["train_on_what"].read(source),
        "eval.generate": False,
        **{f"data.max_{part}_tokens": longest or _LONGEST for part in ("total", "prompt", "response")},
    }
    if validates(source):
        ours["data.val"] = _parts(source, "eval_datasets", "eval_dataset_splits", "eval_dataset_name", "eval_dataset_split")
    return ours


def validates(source: Source) -> bool:
    return source.has("eval_datasets") or source.has("eval_dataset_name")


def layout(source: Source) -> dict[str, Any]:
    world = source.count("placement.num_nodes") * source.count("placement.num_gpus_per_node")
    megatron = "megatron_config." if source.text("strategy") == "megatron" else ""
    return policy(source, world, megatron, recomputes=True) | optimizer(source, "", "policy", megatron=megatron)


def micro_batch(source: Source) -> dict[str, Any]:
    longest = source.whole("max_length") or _LONGEST
    if source.flag("use_sequence_packing"):
        return {"policy.tokens_per_micro_batch": max(source.whole("max_tokens_per_microbatch") or 0, longest)}
    return {"policy.tokens_per_micro_batch": source.count("micro_train_batch_size_per_gpu") * longest}


def run(source: Source) -> dict[str, Any]:
    steps = [number for key in ("num_steps", "max_training_steps") if (number := source.whole(key)) is not None]
    resume = source.text("resume_from")
    return {
        "trainer.steps": min(steps, default=None),
        "trainer.epochs": 1_000_000 if source.whole("num_steps") is not None else source.count("num_epochs"),
        "trainer.eval_every": source.interval("eval_interval") if validates(source) else 0,
        "trainer.run_dir": source.path("ckpt_path") or f"runs/{source.text('run_name')}",
        "trainer.resume": {None: "never", "latest": "auto"}.get(resume, resume),
    }


DERIVED = (program, data, layout, micro_batch, low_rank, run, fields("skyrl_sft")["tracking"])
