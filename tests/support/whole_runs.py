"""What tests of whole runs share: models and data of a tiny run, its metrics, when two runs are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import fivefold
from tests.support.tiny_models import make_classifier

REWARD = """
def digits(response):
    return sum(c.isdigit() for c in response) / 12
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


def left_in(temporary: Path) -> list[str]:
    """What stays in the directory for temporary files besides compiled kernels, which later runs use."""
    return sorted(path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_"))


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
