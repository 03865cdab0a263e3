"""The arguments of subcommands whose bodies are here: what the parser needs of them, without their imports."""

from __future__ import annotations

import argparse
from pathlib import Path

ENGINES = ("transformers", "vllm", "sglang")
SHELLS = ("bash", "zsh", "fish")
BY_SOURCE = "by-source"
"""The answer for rewards that each row's data_source chooses."""


def init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", nargs="?", type=Path, default=Path("run.yaml"), help="file to write (default run.yaml)")
    parser.add_argument("--model", help="model directory or hub id")
    parser.add_argument("--data", help="parquet or jsonl file of training rows")
    parser.add_argument("--val", help="file of validation rows; the one next to the training rows when left out")
    parser.add_argument("--reward", help=f"reward names with commas between, path.py:function, or {BY_SOURCE}")
    parser.add_argument("--gpus", help="GPUs of the run; 0 runs on the CPU")
    parser.add_argument("--engine", choices=ENGINES, help="what samples")
    parser.add_argument("--method", help="grpo, ppo, sft, dpo, ... (docs/methods.md)")
    parser.add_argument("--prompt-key", help="column of the prompt, where its name is none of the usual ones")
    parser.add_argument("--answer-key", help="column of the ground truth, or of the response to imitate")
    parser.add_argument("--yes", action="store_true", help="ask nothing, take what is proposed")
    parser.add_argument("--force", action="store_true", help="overwrite the file")


def doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="?", type=Path, default=Path("runs"), help="where runs will write (default runs)")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--seconds", type=float, help="longest time of each probe")


def completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)
