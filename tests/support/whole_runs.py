"""What tests of whole runs share: a tiny model made by the command line, the metrics of a run, when two runs are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import fivefold

TIMES = ("time/", "throughput/", "memory/", "wall")


def make_model(root: Path) -> None:
    """Sums, a tokenizer of their characters and a tiny Qwen3, made by the command line."""
    sizes = ["--hidden", 32, "--layers", 2, "--ffn", 64]
    for command in (
        ["data", "arithmetic", "--out", root / "data", "--limit", 64],
        ["train-tokenizer", "char", "--data", root / "data/train.parquet", "--out", root / "tokenizer"],
        ["init-model", "qwen3", "--tokenizer", root / "tokenizer", "--out", root / "model", *sizes],
    ):
        done = fivefold(*command)
        assert done.returncode == 0, done.stderr


def metrics(root: Path, name: str) -> list[dict[str, float]]:
    lines = (root / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 2e-5) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for got, want in zip(found, expected, strict=True):
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
