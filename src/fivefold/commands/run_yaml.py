"""The text of a run's YAML file with comments, as `fivefold init` writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from fivefold.algo.methods import METHODS
from fivefold.config.schema import DataConfig
from fivefold.data.rows import Columns

LEARNING_RATES = {"rollouts": 1e-6, "responses": 1e-5, "pairs": 5e-7}
MOST_PROMPT, MOST_RESPONSE, MOST_PROMPTS = 512, 1024, 32
_COLUMN = 43


@dataclass(frozen=True)
class Answers:
    """Answers to the questions of `fivefold init`."""

    model: str
    positions: int
    """Positions of the model, which a prompt and its response share."""
    train: str
    val: str | None
    columns: Columns
    rows: int
    rewards: tuple[str, ...]
    """Names of reward functions; empty if the rows' data_source chooses."""
    layout: str
    is_cpu: bool
    engine: str
    """Engine, written as in engine.backend."""
    method: str


Line = tuple[str, Any, str]
"""Key, value and comment of one line."""


def write(answers: Answers) -> str:
    """Return the YAML text."""
    parts = [
        "# Written by `fivefold init`. Every other key, with its default: docs/configuration.md.",
        "# `fivefold check THIS_FILE` reports whether the run can start; trainer.steps=10 after it changes a key once.",
    ]
    for name, lines in _sections(answers):
        parts += ["", f"{name}:", *map(_render, lines)]
    return "\n".join(parts) + "\n"


def _sections(answers: Answers) -> Iterable[tuple[str, list[Line]]]:
    method = METHODS[answers.method]
    yield "model", [("path", answers.model, "a Hugging Face directory, or an id of its hub")]
    yield (
        "policy",
        [
            ("backend", answers.layout, "d replicas, each over t tensor-parallel ranks: docs/layouts.md"),
            ("dtype", "float32" if answers.is_cpu else "bfloat16", "of parameters and activations"),
            ("tokens_per_micro_batch", 8192, "lower it where memory is short"),
            ("optimizer", {"lr": LEARNING_RATES[method.learns_from]}, "AdamW; also clip_grad, warmup_steps, schedule"),
        ],
    )
    algorithm: list[Line] = [("name", answers.method, "docs/methods.md has every method and its choices")]
    if not method.offline:
        algorithm.append(("group_size", 8, "samples of each prompt"))
    yield "algorithm", algorithm
    if not method.offline:
        yield (
            "engine",
            [
                ("backend", answers.engine, "what samples: docs/engines.md"),
                ("sampling", {"temperature": 1.0}, "also top_p, top_k, min_p"),
            ],
        )
    yield "data", _data(answers)
    if not method.offline:
        comment = "name -> weight; your own is written path/to/file.py:function"
        yield (
            "reward",
            [("functions", dict.fromkeys(answers.rewards, 1.0), comment)]
            if answers.rewards
            else [("functions", {}, "chosen by each row's data_source; or name -> weight")],
        )
    yield (
        "trainer",
        [
            ("epochs", 1, "passes over the data; steps: 100 ends the run earlier"),
            ("save_every", 50, "steps between checkpoints; a run that was ended resumes from the latest"),
            *([("eval_every", 20, "steps between evaluations")] if answers.val else []),
            ("device", "cpu" if answers.is_cpu else "auto", "auto takes GPUs where there are any"),
        ],
    )


def _data(answers: Answers) -> list[Line]:
    usual, columns = DataConfig(), answers.columns
    prompt = min(MOST_PROMPT, answers.positions // 2)
    lines: list[Line] = [("train", [answers.train], "files, or OWNER/NAME of the hub: docs/data.md")]
    if answers.val:
        lines.append(("val", [answers.val], ""))
    if columns.prompt != usual.prompt_key:
        lines.append(("prompt_key", columns.prompt, "column of the prompt: text or messages"))
    if columns.ground_truth != usual.ground_truth_key:
        lines.append(("ground_truth_key", columns.ground_truth, "column with the answer that rewards compare with"))
    if columns.response != usual.response_key:
        lines.append(("response_key", columns.response, "column of the response to imitate"))
    return [
        *lines,
        ("prompts_per_step", _power_of_two(min(MOST_PROMPTS, answers.rows)), ""),
        ("max_prompt_tokens", prompt, "longer prompts are left out and counted"),
        ("max_response_tokens", min(MOST_RESPONSE, answers.positions - prompt), "sampling ends there"),
    ]


def _power_of_two(most: int) -> int:
    return 1 << max(0, most.bit_length() - 1)


def _render(line: Line) -> str:
    key, value, comment = line
    is_nested = isinstance(value, (dict, list))
    shown = yaml.safe_dump({key: value}, default_flow_style=is_nested, width=10**6, allow_unicode=True).strip(" \n")
    text = "  " + (shown[1:-1] if is_nested else shown)
    return f"{text:<{_COLUMN}} # {comment}" if comment else text
