"""Translate verl's SFT trainer, `verl.trainer.sft_trainer`; legacy/verl_sft.py has the older `fsdp_sft_trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fivefold_dialects import shared, trainers
from fivefold_dialects.known import known
from fivefold_dialects.legacy import verl_sft as older
from fivefold_dialects.source import Source
from fivefold_dialects.table import Table, fields, table
from fivefold_dialects.verl_models import SCHEDULES, TOTAL_STEPS, low_rank, schedule

_ENGINES = ("optim", "engine", "model_engine")
"""Keys that name an engine; the optimizer's key comes first."""


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings are those of an SFT trainer."""
    names = (str(settings.get("-m")), str(settings.get("--config-name")))
    is_named = any("sft_trainer" in name for name in names)
    return is_named or any(key.startswith("optim.") or key in ("model.partial_pretrain", "model.path") for key in settings)


def table_of(settings: Mapping[str, Any]) -> Table:
    """Return the table for the SFT trainer and the engine that these settings choose."""
    if older.is_meant(settings):
        return OLDER_TABLE
    return AUTOMODEL_TABLE if _optimizer_of(settings) == "automodel" else TABLE


def _optimizer_of(settings: Mapping[str, Any]) -> str:
    """Return the engine whose optimizer is configured: `optim=NAME`, or else the name of the engine."""
    named = (str(settings.get(key, "")).strip("'\"") for key in _ENGINES)
    return next((name for name in named if name in SCHEDULES), "fsdp")


FIELDS = fields("verl_sft")


def is_megatron(source: Source) -> bool:
    return "megatron" in (source.text(key) for key in ("engine", "model_engine", "engine.strategy"))


def layout(source: Source) -> dict[str, Any]:
    gpus, engine = source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node"), source.under("engine.")
    if not is_megatron(source):
        is_built = _optimizer_of({key: source.text(key) for key in _ENGINES}) == "fsdp"
        return trainers.fsdp(source, gpus, "engine.", cp=shared.ulysses(engine, source), is_built=is_built)
    ours: dict[str, Any] = {"policy.backend": str(shared.world_layout(gpus, **shared.parallel_sizes(engine)))}
    ours |= shared.virtual_stages(engine, "policy")
    return ours | shared.megatron_options(source, "engine.override_transformer_config", "policy.megatron")


def memory(source: Source) -> dict[str, Any]:
    """Return our keys of the policy's data type, recomputation and offload."""
    ours = {**shared.offload(source, "engine.", "policy"), "policy.dtype": shared.dtype(source, "engine.dtype")}
    if _optimizer_of(source.settings) == "veomni" and source.has(key := "engine.mixed_precision") and not source.flag(key):
        source.lacks(key, "weights of bfloat16 without a copy in float32")
    if is_megatron(source):
        return ours | shared.recompute(source, "engine.override_transformer_config", "policy")
    key = "engine.activation_checkpointing"
    key = key if source.text("engine") == "automodel" else "model.enable_gradient_checkpointing"
    return ours | ({"policy.recompute": "full"} if source.flag(key) else {})


def micro_batch(source: Source) -> dict[str, Any]:
    longest = source.count("data.max_length")
    if not source.flag("data.use_dynamic_bsz"):
        return {"policy.tokens_per_micro_batch": max((source.whole("data.micro_batch_size_per_gpu") or 1), 2) * longest}
    key = "engine.context_parallel_size" if is_megatron(source) else "engine.ulysses_sequence_parallel_size"
    budget = source.count("data.max_token_len_per_gpu") * (source.whole(key) or 1)
    return {"policy.tokens_per_micro_batch": max(budget, 2 * longest)}


def optimizer(source: Source, engine: str = "") -> dict[str, Any]:
    """Return our optimizer keys with the schedule of `engine`, by default the engine of the keys `optim` and `engine`."""
    optim, engine = source.under("optim."), engine or _optimizer_of({key: source.text(key) for key in _ENGINES})
    # verl passes no betas to Megatron's optimizer.
    betas = [0.9, 0.999] if engine == "megatron" else optim.numbers("betas")
    total = None if engine == older.PROGRAM else source.whole(TOTAL_STEPS)
    aware = engine == "megatron" and optim.flag("use_precision_aware_optimizer")
    ours = {f"policy.optimizer.{name}": value for name, value in schedule(optim, engine, total).items()}
    return {"policy.optimizer.betas": betas, **ours, **shared.moments(optim, are_read=aware or engine == "automodel")}


def columns(source: Source) -> dict[str, Any]:
    """Return our keys of the columns with prompt and response, also inside another column: `extra_info.question`."""
    return {
        f"data.{key}": ".".join([source.text(f"data.{key}") or "", *source.texts(f"data.{inner}")])
        for key, inner in (("prompt_key", "prompt_dict_keys"), ("response_key", "response_dict_keys"))
    }


def lengths(source: Source) -> dict[str, Any]:
    """Return our length limits: verl limits prompt and response together, so each of them gets the whole length."""
    if source.text("data.truncation") not in ("error", None):
        reason = "a response that is too long is cut off at its end; prompts that are too long are refused"
        source.fixed("data.truncation", reason)
    return FIELDS["lengths"](source)


def first_rows(source: Source, key: str = "data.train_max_samples") -> dict[str, Any]:
    """Return our key for training on the first rows of a file (train_max_samples)."""
    if ((source.whole(key) if source.has(key) else None) or 0) <= 0:
        return {}
    files = source.files("data.train_files") or []
    if len(files) != 1:
        source.lacks(key, "the first rows of several files together: write `FILE[:N]` for each file in data.train")
        return {}
    return {"data.train": [f"{files[0]}[:{source.whole(key)}]"]}


def frequency(source: Source, key: str) -> int | None:
    if source.text(key) != "after_each_epoch":
        return source.interval(key)
    source.lacks(key, "after each epoch: set a number of steps", changes_result=False)
    return None


def evaluation_interval(source: Source, key: str = "trainer.test_freq") -> dict[str, Any]:
    ours = {"trainer.eval_every": frequency(source, key) if source.items("data.val_files") else 0}
    rows = (source.whole("data.val_max_samples") if source.has("data.val_max_samples") else None) or 0
    return ours | ({"eval.max_prompts": rows} if rows > 0 else {})


def resume(source: Source) -> dict[str, Any]:
    mode = (source.text("trainer.resume_mode") or "auto").lower()
    if mode == "resume_path":
        return {"trainer.resume": source.text("trainer.resume_from_path")}
    modes = {"auto": "auto", "disable": "never", "off": "never"}
    if mode not in modes:
        source.lacks("trainer.resume_mode", f"{mode}: known here are {', '.join(modes)}, resume_path")
    return {"trainer.resume": modes.get(mode)}


DERIVED = (
    partial(low_rank, start="model.", by_megatron=is_megatron),
    *(FIELDS["further_tokens"], columns, lengths, first_rows, layout, memory, micro_batch, optimizer),
    *(FIELDS["method"], shared.epochs_and_steps, evaluation_interval, resume, FIELDS["tracking"]),
)
TABLE = table("verl_sft", DERIVED, {"frequency": frequency}, known=known("verl"))
AUTOMODEL_TABLE = replace(
    TABLE, defaults={**TABLE.defaults, "optim.lr": 1e-5, "optim.init_lr_ratio": 0.1, "optim.min_lr_ratio": 0.01}
)
OLDER_TABLE = older.table(TABLE, optimizer)
