"""What tests of whole runs share: models and data of a tiny run, its metrics, when two runs are the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.commands import Command, children_of, fivefold, gone, is_free, wait_for
from tests.support.tiny_models import make_classifier
from tests.support.zygote import THREADS

REWARD = """
def digits(response):
    return sum(c.isdigit() for c in response) / 12
"""
EVERY_RUN = """
model: {path: $ROOT/model}
policy: {dtype: float32, optimizer: {lr: 1.0e-3, eps: 1.0e-4}}
data: {train: [$ROOT/data/train.parquet], max_prompt_tokens: 16}
reward: {functions: {"$ROOT/reward.py:digits": 1.0}}
trainer: {run_dir: $ROOT/runs/base, loggers: [console]}
"""
TIMES = ("time/", "throughput/", "memory/", "wall")


def make_model(root: Path, *, hidden: int = 32, heads: int = 4, layers: int = 2, ffn: int = 64, rows: int = 64) -> None:
    """Sums, a tokenizer of their characters and a tiny Qwen3, made by the command line."""
    sizes = ["--hidden", hidden, "--heads", heads, "--layers", layers, "--ffn", ffn]
    for command in (
        ["data", "arithmetic", "--out", root / "data", "--limit", rows],
        ["train-tokenizer", "char", "--data", root / "data/train.parquet", "--out", root / "tokenizer"],
        ["init-model", "qwen3", "--tokenizer", root / "tokenizer", "--out", root / "model", *sizes],
    ):
        done = fivefold(*command)
        assert done.returncode == 0, done.stderr


def write_run(root: Path, run: str, *, reward: str = REWARD, relative: bool = False) -> None:
    """`run.yaml` with what a test says of its run and, where it says nothing, what every run has; and its reward function.

    `$ROOT` is the directory of both; `relative`: paths are those of a run that is started in it.
    """

    def read(text: str) -> dict[str, Any]:
        return yaml.safe_load(text.replace("$ROOT/", "" if relative else f"{root}/"))

    def over(common: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
        both = {
            key: over(value, further[key]) for key, value in common.items() if isinstance(value, dict) and key in further
        }
        return common | further | both

    (root / "reward.py").write_text(reward)
    (root / "run.yaml").write_text(yaml.safe_dump(over(read(EVERY_RUN) | {"launch": {"threads": THREADS}}, read(run))))


def make_judge(root: Path) -> Path:
    """A reward model with the tokenizer of `make_model`."""
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(root / "model")
    path = make_classifier(root / "judge", vocab_size=len(words))
    words.save_pretrained(path)
    return path


def make_pairs(root: Path) -> Path:
    """The sum in the form that is asked for, against the bare one."""
    rows = [{"prompt": f"{a}+{b}=", "chosen": f"#### {a + b}", "rejected": f"{a + b}"} for a in range(8) for b in range(8)]
    path = root / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def metrics(root: Path, name: str) -> list[dict[str, float]]:
    lines = (root / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def train(root: Path, name: str, *overrides: str) -> tuple[list[dict[str, float]], str]:
    """Metrics of a run that comes to its end, and what it said."""
    done = fivefold("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(root, name), done.stdout


def kill_run(root: Path, name: str, step: int, *overrides: str) -> None:
    """Kill a run once its checkpoint of a step is there."""
    run_dir = root / "runs" / name
    process = Command("train", root / "run.yaml", f"trainer.run_dir={run_dir}", *overrides)
    wait_for((run_dir / f"checkpoints/step-{step:06d}").exists, process)
    everyone = children_of(process.pid)
    process.kill()
    process.wait()
    wait_for(lambda: gone(everyone) and is_free(run_dir))


def end_run(root: Path, name: str, mark: Path, hook: Callable[[], None], *overrides: str, rank: int = 0) -> str:
    """What a run says that is asked to end by a signal to one of its ranks, once the hook has left its mark."""
    process = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides, hook=hook)
    wait_for(mark.exists, process)
    everyone = children_of(process.pid)
    os.kill(sorted(child.pid for child in psutil.Process(process.pid).children())[rank], signal.SIGTERM)
    done = process.finish()
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    wait_for(lambda: gone(everyone))
    return done.stdout


def left_in(temporary: Path) -> list[str]:
    """What stays in the directory for temporary files besides compiled kernels, which later runs use."""
    return sorted(path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_"))


def assert_same(rows: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 2e-5) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for got, want in zip(rows, expected, strict=True):
        assert set(got) == set(want)
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=rel, abs=rounding(key, want)), (got["step"], key)


def rounding(key: str, row: dict[str, float]) -> float:
    """How far float32 may move a metric that is near 0."""
    if key.startswith("rollout/"):
        # Differences of log-probs of engine and trainer are rounding itself (1e-7), and have no digits to compare.
        return 1e-5
    if key == "critic/explained_variance":
        # u = 1 - EV = Var(R - V) / Var(R). Where values and returns move by e, standard deviations move by e at most, so
        # u moves by 2 e (sqrt(u) + u) / std(R): a small spread of the returns magnifies what moves every other metric by e.
        left = 1 - row[key]
        return 2e-6 * (left**0.5 + left) / row["critic/return_std"]
    return 1e-6
