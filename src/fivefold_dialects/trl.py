"""Translate TRL: YAML and command lines of `trl grpo`, `trl dpo` and `trl sft`; this file has what the three share.

trl_grpo.py has GRPO's method, sampling and rewards, trl_words.py reads the command line. Behavior that only code defines was
read in TRL 1.16.0 and transformers 5.23.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from fivefold.errors import UserError, shown
from fivefold.keys.ranges import OneOf
from fivefold_dialects import shared, trl_grpo
from fivefold_dialects.source import EVERY_CHECKPOINT, Source, UnreadableError
from fivefold_dialects.system import System
from fivefold_dialects.table import Table, choices, fields, load, table
from fivefold_dialects.translator import our_defaults
from fivefold_dialects.trl_grpo import at_once, processes, updates_of
from fivefold_dialects.trl_words import read_tree

CHOICES = choices("trl")
NO_PROCESSES = "the number of processes is not given: 8 GPUs are assumed; set another number with --num_processes N"
TEXT_PROMPTS = (
    "a prompt that is plain text gets the chat template here, but not in TRL: for such rows add "
    "-- data.apply_chat_template=false"
)
_TARGETS = ["q_proj", "v_proj"]
"""Default target modules of PEFT for Llama, Mistral, Qwen and Gemma."""


def layout(source: Source) -> dict[str, Any]:
    world = processes(source)
    if not any(source.has(key) for key in ("num_processes", "accelerate.num_processes", "accelerate_config")):
        source.note(NO_PROCESSES)
    newer = source.value("activation_checkpointing") is not None
    recompute = source.flag("activation_checkpointing" if newer else "gradient_checkpointing")
    return {
        "policy.backend": str(shared.world_layout(world)),
        "policy.recompute": "full" if recompute else "none",
        "policy.router_balance": balance(source),
        "trainer.device": "cpu" if source.flag("use_cpu") else None,
    }


def balance(source: Source) -> str:
    """Return our setting of the routers' loss: `none` if the coefficient is 0, otherwise as in config.json."""
    coefficient = source.number("router_aux_loss_coef")
    if coefficient:
        source.lacks("router_aux_loss_coef", "its own coefficient: policy.router_balance takes the one in config.json")
    return "none" if coefficient == 0 else "config"


def dtype(source: Source) -> dict[str, Any]:
    half = source.flag("fp16")
    if half or source.value("bf16") is None or source.flag("bf16"):
        return {"policy.dtype": "float16" if half else "bfloat16"}
    key = "torch_dtype" if source.has("torch_dtype") else "dtype"
    name = source.text(key) or "float32"
    if name not in shared.DTYPES:
        source.lacks(key, "the data type of the model's files: set bfloat16, float16 or float32")
    return {"policy.dtype": shared.DTYPES.get(name)}


def low_rank(source: Source) -> dict[str, Any]:
    if not source.flag("use_peft"):
        return {}
    ours = shared.adapters(source, "policy", "trl")
    if source.count("lora_r") < 1:
        raise UnreadableError(f"lora_r must be above 0 with use_peft: got {source.count('lora_r')}")
    if source.flag("use_rslora"):
        ours["policy.lora.alpha"] *= math.sqrt(ours["policy.lora.rank"])
    return ours | {"policy.lora.target_modules": ours["policy.lora.target_modules"] or _TARGETS}


def hub(name: str, config: str | None, split: str | None) -> str:
    """Return a data set's name for our loader, as OWNER/NAME:CONFIG/SPLIT; defaults of the hub are left out."""
    parts = [part for part in (config, split) if part]
    return f"{name}:{'/'.join(parts)}" if config or split not in (None, "train") else name


def data(source: Source) -> dict[str, Any]:
    source.note(TEXT_PROMPTS)
    name, config = source.text("dataset_name"), source.text("dataset_config")
    evaluates = interval(source, "eval") != 0
    if entries := source.items("datasets"):
        train = [file for entry in entries for file in _mixed(source, entry)]
        if evaluates:
            source.lacks("datasets", "evaluation on a mixture's split: -- data.val=[...]", changes_result=False)
        return {"data.train": train, "trainer.eval_every": 0}
    if source.keys("dataset_mixture"):
        return {}
    if name is None:
        raise UnreadableError("dataset_name must name a data set: got none")
    ours: dict[str, Any] = {"data.train": [hub(name, config, source.text("dataset_train_split"))]}
    if evaluates:
        ours["data.val"] = [hub(name, config, source.text("dataset_test_split"))]
    return ours | {"trainer.eval_every": interval(source, "eval")}


def _mixed(source: Source, entry: Any) -> list[str]:
    """Return the files or the hub's name of one entry of `datasets`."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise UnreadableError(f"datasets must be a list of mappings with a path: got {shown(entry)}")
    files = entry.get("data_files")
    named = [entry.get("name"), entry.get("split"), *(files if isinstance(files, list) else [files])]
    if not all(name is None or isinstance(name, str) for name in named):
        raise UnreadableError(f"name, split and data_files of {entry['path']} in datasets must be texts: got {shown(entry)}")
    if lacking := [key for key in ("data_dir", "fraction") if entry.get(key) is not None]:
        source.lacks("datasets", f"{lacking[0]} of {entry['path']}: data.mixture has fixed shares of domains")
    if files is not None and entry["path"] in ("json", "parquet"):
        return [files] if isinstance(files, str) else [str(file) for file in files]
    return [hub(entry["path"], entry.get("name"), entry.get("split", "train"))]


def optimizer(source: Source) -> dict[str, Any]:
    name, kwargs = source.text("lr_scheduler_type"), source.under("lr_scheduler_kwargs.")
    lowest = None
    if name == "cosine_with_min_lr":
        share = kwargs.number("min_lr_rate")
        lowest = kwargs.number("min_lr") if share is None else share * (source.number("learning_rate") or 0.0)
    if kwargs.has("num_cycles") and kwargs.number("num_cycles") != 0.5:
        kwargs.lacks("num_cycles", "a cosine with another number of cycles")
    warmup = source.number("warmup_steps") or source.number("warmup_ratio") or 0.0
    last = source.whole("max_steps") or -1
    if 0 < warmup < 1 <= last:
        warmup = math.ceil(warmup * last)
    ours = {
        "schedule": CHOICES["lr_scheduler_type"].read(source),
        "warmup_steps": 0.0 if name == "constant" else warmup,
        "warmup_from": 0,
        "clip_grad": source.number("max_grad_norm") or 0.0,
        "min_lr": lowest,
        "betas": [source.number("adam_beta1"), source.number("adam_beta2")],
    }
    return {f"policy.optimizer.{key}": value for key, value in ours.items()}


def in_rollouts(source: Source, key: str, steps: float, *, changes_result: bool) -> int:
    """Return optimizer steps as a number of rollouts, of several updates each; with DPO and SFT one update is a rollout."""
    updates = updates_of(source) * source.count("num_iterations") if "num_iterations" in source.defaults else 1
    if steps % updates:
        source.lacks(key, f"no multiple of the {updates} optimizer steps of a rollout", changes_result=changes_result)
    return max(1, round(steps / updates))


def interval(source: Source, event: Literal["save", "eval"]) -> int | Literal["epoch"]:
    """Return our steps between two events, or `epoch`; 0 means never."""
    older = event == "eval" and source.has("evaluation_strategy")
    strategy = (source.text("evaluation_strategy" if older else f"{event}_strategy") or "no").lower()
    if strategy in ("no", "false"):
        return 0
    if strategy == "epoch":
        return "epoch"
    key = f"{event}_steps"
    if strategy != "steps":
        source.lacks(f"{event}_strategy", f"the strategy {strategy}: known are steps, epoch and no", changes_result=False)
    steps = source.number(key) or source.number("logging_steps") or 0.0
    if 0 < steps < 1:
        if (last := source.whole("max_steps") or -1) < 1:
            source.lacks(key, "a share of the run, which needs max_steps", changes_result=False)
            return 0
        steps = math.ceil(steps * last)
    return in_rollouts(source, key, steps, changes_result=False)


def run(source: Source) -> dict[str, Any]:
    last, epochs = source.whole("max_steps") or -1, source.number("num_train_epochs") or 0.0
    resume = (source.text("resume_from_checkpoint") or "false").lower()
    if resume not in ("true", "false"):
        source.lacks("resume_from_checkpoint", "a checkpoint of transformers: model_name_or_path takes its weights")
    ours: dict[str, Any] = {
        "trainer.run_dir": source.path("output_dir") or "trainer_output",
        "trainer.save_every": interval(source, "save"),
        "trainer.keep": source.whole("save_total_limit") or EVERY_CHECKPOINT,
        "trainer.resume": "auto" if resume == "true" else "never",
    }
    if last > 0:
        return ours | {"trainer.steps": in_rollouts(source, "max_steps", last, changes_result=True)}
    if epochs % 1:
        source.lacks("num_train_epochs", "a part of an epoch: max_steps counts optimizer steps")
    return ours | {"trainer.epochs": max(1, int(epochs))}


def trackers(source: Source, key: str) -> list[str]:
    """Return the terminal and the trackers in report_to."""
    names = source.texts(key)
    if set(names) <= {"none", "False"}:
        return ["console"]
    return list(dict.fromkeys(["console", *source.loggers(key)]))


def offline(source: Source, older: str = "max_length") -> dict[str, Any]:
    """Return our keys of batches and lengths of DPO and SFT; `older` is a former name of max_length."""
    key = older if source.has(older) else "max_length"
    if (longest := source.whole(key)) is None:
        raise UnreadableError(f"{key} must be a whole number, because sequences are cut off at this length: got none")
    return {
        "data.prompts_per_step": at_once(source) * source.count("gradient_accumulation_steps"),
        **{f"data.max_{part}_tokens": longest for part in ("total", "prompt", "response")},
        "data.tools_key": "tools",
        "policy.tokens_per_micro_batch": max(our_defaults()["policy.tokens_per_micro_batch"], 2 * longest),
        "eval.generate": False if interval(source, "eval") else None,
    }


def evaluation(source: Source) -> dict[str, Any]:
    """Return our keys of evaluation: by default as many responses as in training, with the same sampling."""
    if interval(source, "eval") == 0:
        return {}
    ours = {"temperature": source.number("temperature"), "top_p": source.number("top_p")}
    ours |= {"samples": source.whole("num_generations_eval") or source.whole("num_generations")}
    return {f"eval.{key}": value for key, value in ours.items()} | {"eval.top_k": source.top_k("top_k")}


def dpo(source: Source) -> dict[str, Any]:
    if source.texts("loss_type") != ["sigmoid"]:
        source.lacks("loss_type", "another loss than sigmoid, or several")
    return {"algorithm.name": "dpo"}


def sft(source: Source) -> dict[str, Any]:
    turns, completion = source.flag("assistant_only_loss"), source.value("completion_only_loss")
    if completion is not None and not source.flag("completion_only_loss"):
        source.lacks("completion_only_loss", "a loss on prompts")
    elif completion is None and not turns:
        source.lacks(
            "assistant_only_loss",
            "a loss on all turns of a conversation, also the user's: set --assistant_only_loss for rows with messages, and "
            "--completion_only_loss true for rows with prompt and completion",
        )
    return {"algorithm.name": "sft", "data.response_key": "completion"}


_COMMON = (layout, dtype, low_rank, data, optimizer, run, fields("trl")["tracking"])
_DERIVED = {
    "grpo": (*trl_grpo.DERIVED, evaluation),
    "dpo": (offline, dpo),
    "sft": (partial(offline, older="max_seq_length"), sft),
}


def _table(name: str, **others: Any) -> Table:
    """Return the table of a program: its own sections, and those that all programs share."""
    content = load("trl")
    changed = content["programs"][name]
    sections = changed["sections"] | dict.fromkeys(content["sections"], "trl")
    converters = {
        "trackers": trackers,
    }
    return table({**content, **changed, "sections": sections}, (*_COMMON, *_DERIVED[name]), converters, **others)


GRPO = _table("grpo")
TABLES = {"grpo": GRPO, "dpo": _table("dpo", page_of=GRPO), "sft": _table("sft", page_of=GRPO)}


def table_of(settings: Mapping[str, Any]) -> Table:
    """Return the table of the named program, or else of the one with most of these keys; raise UserError if not unique."""
    if (name := settings.get("-m")) is None:
        known = {name: sum(table.row(key) is not None for key in settings) for name, table in TABLES.items()}
        most = [name for name, count in known.items() if count == max(known.values())]
        if len(most) > 1:
            raise UserError(f"the settings fit {' and '.join(most)}: begin with the program, as in trl {most[0]}")
        return TABLES[most[0]]
    if fault := OneOf(TABLES).fault(name):
        raise UserError(f"the program of TRL {fault}: other programs may do things that no key shows")
    return TABLES[name]


translate = System("trl", tuple(TABLES.values()), table_of, read_tree=read_tree)
