"""SkyRL's SFT program, `skyrl.train.main_sft`: its own flat keys.

What its code explains was read in SkyRL a9564572e (2026-08-21); a note has the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.adapters import adapters, refuse
from fivefold.config.dialects.shared import EVERY_CHECKPOINT, KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.skyrl_rows import SAID
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.table import Section, below, fixed, lacks, slower, to, used

DEFAULTS: dict[str, Any] = {
    "strategy": "megatron",
    "model.path": "Qwen/Qwen3-0.6B",
    "model.lora.rank": 0,
    "model.lora.alpha": 16,
    "model.lora.target_modules": "all-linear",
    "model.lora.init_method": "kaiming",
    "train_datasets": ["yahma/alpaca-cleaned"],
    "train_dataset_splits": ["train[:100]"],
    "dataset_name": "yahma/alpaca-cleaned",
    "dataset_split": "train[:100]",
    "eval_dataset_split": "validation",
    "eval_interval": 0,
    "eval_before_train": False,
    "messages_key": "messages",
    "system_key": "system",
    "tools_key": "tools",
    "train_on_what": "last_assistant_message",
    "num_epochs": 1,
    "batch_size": 4,
    "micro_train_batch_size_per_gpu": 2,
    "use_sequence_packing": False,
    "sampler": "random",
    "placement.num_nodes": 1,
    "placement.num_gpus_per_node": 4,
    "sequence_parallel_size": 1,
    "megatron_config.tensor_model_parallel_size": 2,
    "megatron_config.pipeline_model_parallel_size": 2,
    "megatron_config.transformer_config_kwargs.recompute_granularity": "full",
    "megatron_config.transformer_config_kwargs.recompute_method": "uniform",
    "megatron_config.transformer_config_kwargs.recompute_num_layers": 1,
    "optimizer_config.lr": 1e-6,
    "optimizer_config.adam_betas": [0.9, 0.999],
    "optimizer_config.weight_decay": 0.01,
    "optimizer_config.max_grad_norm": 1.0,
    "optimizer_config.num_warmup_steps": 0,
    "optimizer_config.scheduler": "constant_with_warmup",
    "logger": "console",
    "project_name": "skyrl_sft",
    "run_name": "skyrl_sft_run",
    "ckpt_path": "",
    "ckpt_interval": 0,
    "max_ckpts_to_keep": -1,
    "resume_from": "",
    "seed": 42,
}
PROGRAMS = ("main_sft", "main_sft_with_callbacks")
"""The second one shows e to the loss besides."""
_LONGEST = 1 << 20
"""Tokens of a sequence that nothing bounds."""
_BOUND = "sequences that nothing cuts off: max_length"


def looks_like(settings: Mapping[str, Any]) -> bool:
    """Settings of the SFT program: by its name, or by keys that the others have under `trainer.`."""
    if (program := str(settings.get("-m", ""))) and "sft" in program:
        return True
    return not any(key.startswith(("trainer.", "generator.")) for key in settings) and any(
        key.startswith("train_dataset") or key in ("dataset_name", "dataset_split", "messages_key") for key in settings
    )


def program(source: Source) -> dict[str, Any]:
    name = (source.text("-m") or "main_sft").rpartition(".")[2]
    if name not in PROGRAMS:
        source.lacks("-m", "another program than main_sft: it may do what no key says")
    return {"algorithm.name": "sft", "model.path": shared.path(source, "model.path")}


def _slices(source: Source, key: str) -> list[str]:
    """A list of slices, whose own brackets and colons YAML would take for its own: `[train[:100],train[100:]]`."""
    raw = source.raw(key)
    if not isinstance(raw, str) or "[" not in raw.strip("'\" ")[1:]:
        return source.texts(key)
    inner = raw.strip("'\" ")
    inner = inner[1:-1] if inner.startswith("[") else inner
    return [part.strip("'\" ") for part in re.split(r",(?![^\[]*\])", inner)]


def _parts(source: Source, sets: str, splits: str, older_set: str, older_split: str) -> list[str]:
    """Files of data sets of the hub, OWNER/NAME-SPLIT.parquet, with the rows of a slice."""
    if (source.has(older_set) or source.has(older_split)) and not source.has(sets):
        names, slices = source.texts(older_set), _slices(source, older_split)
    else:
        names, slices = source.texts(sets), _slices(source, splits)
    if not names:
        return []
    if len(names) != len(slices):
        raise UnreadableError(f"{splits} must have one entry for each of {sets}: got {len(slices)} for {len(names)}")
    found = []
    for name, split in zip(names, slices, strict=True):
        split_name, bracket, rows = split.partition("[")
        if bracket and (":" not in rows or not set(rows) <= set("-0123456789:]")):
            source.lacks(splits, f"the slice {split}: [begin:end] in rows is read")
        found.append(f"{name}-{split_name}.parquet{bracket}{rows}")
    return found


def data(source: Source) -> dict[str, Any]:
    train = _parts(source, "train_datasets", "train_dataset_splits", "dataset_name", "dataset_split")
    found: dict[str, Any] = {
        "data.train": train,
        **{f"data.{key}": source.text(key) for key in ("messages_key", "system_key", "tools_key")},
        "data.prompts_per_step": source.count("batch_size"),
        "data.shuffle": source.text("sampler") == "random",
        "eval.generate": False,
    }
    if len(train) > 1:
        source.lacks(
            "train_datasets", "rows of several sets drawn with replacement by weight: data.mixture has fixed shares"
        )
    if source.has("eval_datasets") or source.has("eval_dataset_name"):
        found["data.val"] = _parts(source, "eval_datasets", "eval_dataset_splits", "eval_dataset_name", "eval_dataset_split")
    turns = {"last_assistant_message": "last", "all_assistant_messages": "all"}
    if (learned := source.text("train_on_what") or "") not in turns:
        source.lacks("train_on_what", f"learning from {learned}: known here are {', '.join(turns)}")
    found["data.learned_turns"] = turns.get(learned)
    if source.text("sampler") not in ("random", "sequential"):
        source.lacks("sampler", "an order of one's own")
    longest = source.whole("max_length")
    if longest is None:
        source.lacks("max_length", _BOUND)
        longest = _LONGEST
    return found | {
        "data.max_total_tokens": longest,
        "data.max_prompt_tokens": longest,
        "data.max_response_tokens": longest,
    }


def layout(source: Source) -> dict[str, Any]:
    world = source.count("placement.num_nodes") * source.count("placement.num_gpus_per_node")
    if source.text("strategy") != "megatron":
        sizes = {"cp": source.whole("sequence_parallel_size") or 1}
        return {"policy.backend": str(shared.world_layout(world, **sizes)), "policy.recompute": "full"}
    sizes = shared.parallel_sizes(source.under("megatron_config."))
    kwargs = "megatron_config.transformer_config_kwargs"
    return {
        "policy.backend": str(shared.world_layout(world, **sizes)),
        "policy.sequence_parallel": True,
        **shared.recompute(source, kwargs, "policy"),
        **shared.megatron_options(source, kwargs, "policy.megatron"),
    }


def micro_batch(source: Source) -> dict[str, Any]:
    longest = source.whole("max_length") or _LONGEST
    if source.flag("use_sequence_packing"):
        return {"policy.tokens_per_micro_batch": max(source.whole("max_tokens_per_microbatch") or 0, longest)}
    return {"policy.tokens_per_micro_batch": source.count("micro_train_batch_size_per_gpu") * longest}


def low_rank(source: Source) -> dict[str, Any]:
    names = {"rank": "rank", "alpha": "alpha", "targets": "target_modules", "exclude": "exclude_modules"}
    start = "model.lora."
    found = adapters(source, "policy", init=start + "init_method", **{name: start + key for name, key in names.items()})
    if found:
        refuse(source, start + "dropout", "dropout of adapters", (0, 0.0))
    return found


def run(source: Source) -> dict[str, Any]:
    steps = [number for key in ("num_steps", "max_training_steps") if (number := source.whole(key)) is not None]
    keep, validates = source.whole("max_ckpts_to_keep") or -1, source.has("eval_datasets") or source.has("eval_dataset_name")
    resume = source.text("resume_from")
    return {
        "trainer.steps": min(steps) if steps else None,
        "trainer.epochs": 1_000_000 if source.whole("num_steps") is not None else source.count("num_epochs"),
        "trainer.eval_every": shared.interval(source, "eval_interval") if validates else 0,
        "trainer.eval_before_train": source.flag("eval_before_train"),
        "trainer.run_dir": shared.path(source, "ckpt_path") or f"runs/{source.text('run_name')}",
        "trainer.resume": {None: "never", "latest": "auto"}.get(resume, resume),
        "trainer.keep": keep if keep > 0 else EVERY_CHECKPOINT,
    }


tracked = shared.tracked("logger", "project_name", "run_name", tags="tags")
SECTIONS = (
    Section.of("Memory and communication", *SAID),
    Section.of(
        "SFT",
        used(
            "train_datasets train_dataset_splits dataset_name dataset_split",
            "data.train",
            "OWNER/NAME-SPLIT.parquet, where the set of the hub is to be written first, with the rows of the slice: "
            "`train[:200]` becomes `...-train.parquet[:200]`. Rows of messages, or of Alpaca's form.",
        ),
        used("eval_datasets eval_dataset_splits eval_dataset_name eval_dataset_split", "data.val"),
        lacks("train_dataset_weights", "rows drawn with replacement by weight: data.mixture has fixed shares"),
        lacks("pretokenized_dataset_paths eval_pretokenized_dataset_paths", "rows that are tokens already"),
        fixed("eval_dataset_names", "metrics have the names of data_sources"),
        used("messages_key", "data.messages_key"),
        used("system_key", "data.system_key", "The column system when left out; rows may lack it."),
        used("tools_key", "data.tools_key", "The column tools when left out; rows may lack it."),
        used(
            "train_on_what",
            "data.learned_turns",
            "last_assistant_message learns what the template writes behind the end token too (sft_trainer.py:572), "
            "all_assistant_messages does not (generators/utils.py).",
        ),
        used(
            "max_length",
            "data.max_total_tokens data.max_prompt_tokens data.max_response_tokens",
            "Of prompt and response together: what is beyond is cut off, and a row without a learned token is dropped.",
        ),
        used("batch_size", "data.prompts_per_step", "One update a step, mean over the learned tokens of the batch."),
        used(
            "micro_train_batch_size_per_gpu max_tokens_per_microbatch use_sequence_packing", "policy.tokens_per_micro_batch"
        ),
        used("sampler", "data.shuffle"),
        fixed("sampler_class_path sampler_kwargs sampler_kwargs.**", "read with sampler=custom only", takes_any=True),
        used("num_steps max_training_steps", "trainer.steps"),
        used("num_epochs", "trainer.epochs"),
        used("eval_interval", "trainer.eval_every"),
        used("eval_before_train", "trainer.eval_before_train"),
        used("model.path", "model.path"),
        *(
            used(f"model.lora.{theirs}", f"policy.lora.{ours}")
            for theirs, ours in (
                ("rank", "rank"),
                ("alpha", "alpha"),
                ("target_modules", "target_modules"),
                ("exclude_modules", "exclude_modules"),
                ("init_method", "init"),
                ("dropout", "rank"),
            )
        ),
        lacks("model.fake_int4_qat.enabled", "training for a quantized model", [False]),
        fixed("model.lora.lora_sync_path model.lora.max_loras model.lora.max_cpu_loras", "no engine is given adapters"),
        used("strategy", "policy.backend", "fsdp becomes data-parallel Megatron-Core on as many GPUs."),
        used(
            "placement.num_nodes placement.num_gpus_per_node sequence_parallel_size "
            + " ".join(
                f"megatron_config.{name}_parallel_size"
                for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
            ),
            "policy.backend",
            "2 and 2 of tensors and stages when left out.",
        ),
        used(
            "megatron_config.transformer_config_kwargs.*",
            "policy.recompute policy.megatron.transformer policy.megatron.pipeline",
            takes_any=True,
        ),
        fixed(
            (
                "megatron_config.ddp_config.average_in_collective",
                *below("fsdp_config.", "fsdp_size mixed_precision reshard_after_forward wrap_policy"),
            ),
            SPREAD,
        ),
        fixed("fsdp_config.wrap_policy.**", "how FSDP shards", takes_any=True),
        used("optimizer_config.lr", "policy.optimizer.lr"),
        used("optimizer_config.adam_betas", "policy.optimizer.betas"),
        used("optimizer_config.weight_decay", "policy.optimizer.weight_decay"),
        used("optimizer_config.max_grad_norm", "policy.optimizer.clip_grad"),
        used("optimizer_config.num_warmup_steps", "policy.optimizer.warmup_steps", "The first with rate 0."),
        used("optimizer_config.scheduler", "policy.optimizer.schedule"),
        fixed("optimizer_config.offload_after_step", "read next to an engine only, which SFT has not"),
        fixed("remove_microbatch_padding use_sample_packing use_torch_compile async_batch_collation", KERNELS),
        to("logger", "trainer.loggers", shared.loggers),
        used("project_name run_name tags", "tracking trainer.run_dir"),
        used("ckpt_path", "trainer.run_dir"),
        to("ckpt_interval", "trainer.save_every", shared.interval),
        used("max_ckpts_to_keep", "trainer.keep"),
        used("resume_from", "trainer.resume"),
        slower("hf_save_interval", "`fivefold export` writes a checkpoint in Hugging Face's form", [-1, 0]),
        fixed(
            "export_path hf_export_path", "read with hf_save_interval only; hf_export_path, of 2026-05, exports at the end"
        ),
        fixed("eval_batch_size", "all rows are evaluated"),
        to("seed", "trainer.seed", shared.whole),
        lacks(
            "dummy_run_full_ctx", "a test of memory on made-up sequences, which learns nothing: `fivefold check`", [False]
        ),
        fixed("dummy_run_max_steps", "read with dummy_run_full_ctx only"),
        fixed(
            "num_workers dataloader_num_workers dataloader_persistent_workers cache_dir force_recache disable_cache",
            "how data are read",
        ),
        fixed("enable_ray_gpu_monitor record_memory torch_profiler_config.*", SHOWN, takes_any=True),
        used("-m", "algorithm.name", "main_sft; main_sft_with_callbacks shows e to the loss besides."),
    ),
)
