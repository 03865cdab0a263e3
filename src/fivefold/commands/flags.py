"""Arguments of the subcommands for the parser, without the imports of the subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

ENGINES = ("transformers", "vllm", "sglang")
SHELLS = ("bash", "zsh", "fish")
BY_SOURCE = "by-source"
"""Answer that lets each row's data_source choose the reward."""


def init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", nargs="?", type=Path, default=Path("run.yaml"), help="file to write (default run.yaml)")
    parser.add_argument("--model", help="model directory or hub id")
    parser.add_argument("--data", help="training rows: a parquet or jsonl file, or OWNER/NAME[:CONFIG][/SPLIT] of the hub")
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


def plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="directory with its config.json, or hub id; model.path of the run when left out")
    parser.add_argument("--gpus", type=above_0(int), help="how many GPUs")
    parser.add_argument("--gpu", help="their name; that of this machine when left out")
    parser.add_argument("--node-gpus", type=above_0(int), default=8, help="GPUs of a node (default 8)")
    parser.add_argument(
        "--network", type=above_0(float), default=None, metavar="GB/S", help="of each GPU to other nodes (default 50)"
    )
    parser.add_argument("--price", type=above_0(float), help="of one GPU for an hour: prints the cost of tokens")
    for name in ("prompt", "response"):
        parser.add_argument(
            f"--{name}-tokens", type=above_0(float), help=f"mean length of a {name}; half of its bound when left out"
        )
    parser.add_argument("--top", type=above_0(int), default=3, help="how many runs to print (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine and keep the rates, in two minutes")
    parser.add_argument("--seconds", type=above_0(float), default=120.0, help="most time of --calibrate (default 120)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="rates to read, or to write with --calibrate")


def export(parser: argparse.ArgumentParser, models: Sequence[str]) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="new directory")
    parser.add_argument("--model", choices=models, default="policy", help="model to write (default policy)")
    forms = ["huggingface", "megatron", "adapter"]
    parser.add_argument("--to", choices=forms, default=forms[0], help="form (default huggingface); adapter: as PEFT has it")
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=dtypes, help="of the weights; that of the model's config.json when left out")
    push = "also upload it to the Hugging Face hub, with a model card; a new repository is private"
    parser.add_argument("--push", metavar="OWNER/NAME", help=push)
    parser.add_argument("--shard-gb", type=above_0(float), default=5.0, help="largest safetensors file (default 5)")


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--plot", metavar="METRIC", help="also draw this metric of the first run in the terminal")
    parser.add_argument("--serve", action="store_true", help="show the runs in a browser, live, until Ctrl-C")
    parser.add_argument("--port", type=port, default=8265, help="of --serve (default 8265); 0 takes a free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address for --serve; any but the default lets other machines read the runs"
    )


def watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument(
        "--once", action="store_true", help="print what there is now and end; so where stdout is no terminal"
    )
    parser.add_argument("--every", type=above_0(float), default=2.0, help="seconds between two looks (default 2)")


def track(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", nargs="+", metavar="TRACKER", help="those of trainer.loggers when left out")
    parser.add_argument("--wait", type=above_0(float), default=600.0, help="seconds that it may take (default 600)")


def above_0(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a parser for a number above 0; argparse reports any other text as invalid."""

    def read(text: str) -> float:
        number = kind(text)
        if not 0 < number < 2**31:
            raise ValueError
        return number

    read.__name__ = f"{kind.__name__} above 0"
    return read


def port(text: str) -> int:
    """Parse a port number of the command line."""
    if not 0 <= int(text) < 65536:
        raise ValueError
    return int(text)


port.__name__ = "port from 0 to 65535"
