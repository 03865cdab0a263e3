"""Metrics of nine short runs with the sources of two commits, and runs that the older saves and the newer resumes.

    git worktree add /tmp/older COMMIT
    python benchmarks/same_numbers.py /tmp/older

Each run has fixed seeds, on CPU ranks in float32. A line per run gives the largest relative difference of any metric that
both commits write, and the metrics that only one writes. Exit code 1: a difference above 1e-6, or a run that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tests.support.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[1]
BOUND = 1e-6
TIMES = ("time/", "throughput/", "memory/", "wall", "async/trainer_wait_seconds", "async/complete_groups")
"""Beginnings of metrics that say how long something took, or when it was there."""

GRPO = {"name": "grpo", "group_size": 4, "updates_per_step": 2, "kl": {"coef": 0.01}}
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4}
COMMON: dict[str, Any] = {
    "policy": {"backend": "megatron:d1", "dtype": "float32", "tokens_per_micro_batch": 256, "optimizer": OPTIMIZER},
    "algorithm": GRPO,
    "data": {"prompts_per_step": 8, "max_prompt_tokens": 16, "max_response_tokens": 12},
    "trainer": {"steps": 4, "save_every": 2, "keep": 9, "loggers": ["console"]},
    "launch": {"threads": 1},
}
RUNS: dict[str, dict[str, Any]] = {
    "demo": {"policy": {"backend": "megatron:d1t2"}, "algorithm": {"name": "grpo", "group_size": 8, "kl": {"coef": 0}}},
    "ppo": {
        "algorithm": {
            "name": "ppo",
            "group_size": 2,
            "updates_per_step": 2,
            "lam": 0.95,
            "kl": {"coef": 0.05, "place": "reward"},
        },
        "critic": {"backend": "megatron:d1", "optimizer": {"lr": 2e-3, "eps": 1e-4}, "warmup_steps": 1},
    },
    "dapo": {"algorithm": {"name": "dapo", "group_size": 4, "updates_per_step": 2}},
    "dpo": {"algorithm": {"name": "dpo"}, "data": {"train": ["pairs.jsonl"]}},
    "prime": {
        "algorithm": {"name": "prime", "group_size": 4, "updates_per_step": 2, "process_reward": {"target": "reward"}},
        "prm": {"optimizer": {"lr": 2e-3, "eps": 1e-4}, "updates_per_step": 2},
    },
    "chord": {
        "algorithm": {
            "name": "chord",
            "group_size": 4,
            "updates_per_step": 2,
            "expert": {"weight": 0.5, "token_weight": "none"},
        },
        "data": {"expert": ["expert.jsonl"], "expert_per_step": 4},
    },
    "lora": {"policy": {"backend": "megatron:d2", "lora": {"rank": 4, "alpha": 6}}},
    "experts": {"model": {"path": "experts"}, "policy": {"backend": "megatron:d2e2"}},
    "asynchronous": {"rollout": {"max_staleness": 2}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="a checkout of the older commit")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS), help="(default: all)")
    arguments = parser.parse_args()
    trees = {"older": arguments.older.resolve(), "newer": ROOT}
    print(" ".join(f"{name} {_commit(tree)}" for name, tree in trees.items()), flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _make_inputs(root)
        for name in arguments.runs:
            try:
                for age, tree in trees.items():
                    _train(tree, root, name, age)
                rows = {age: _metrics(root / f"{name}-{age}") for age in trees}
                worst, compared, apart = _compare(rows["older"], rows["newer"])
                print(f"{name}: {compared}, largest difference {worst:.1e}{apart}", flush=True)
                failed += not worst <= BOUND
                worst, compared, apart = _compare(rows["older"], _resume(trees["newer"], root, name))
                print(f"{name}: resumed by the newer after step 2, largest difference {worst:.1e}{apart}", flush=True)
                failed += not worst <= BOUND
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
                failed += 1
    return 1 if failed else 0


def _commit(tree: Path) -> str:
    return subprocess.run(
        ["git", "describe", "--always"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()


def _make_inputs(root: Path) -> None:
    """Sums, a tokenizer, a dense model and one with experts, pairs, an expert's rows and a reward."""
    data = ["--data", "data/train.parquet", "--out", "tokenizer"]
    sizes = ["--tokenizer", "tokenizer", "--hidden", "32", "--heads", "4", "--layers", "2", "--ffn", "64", "--out"]
    for command in (
        ["data", "arithmetic", "--out", "data", "--limit", "64"],
        ["train-tokenizer", "char", *data],
        ["init-model", "qwen3", *sizes, "model"],
    ):
        _fivefold(ROOT, root, command)
    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
    make_model("qwen3_moe", root / "experts", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(root / "experts")
    sums = [(a, b) for a in range(8) for b in range(8)]
    pairs = [{"prompt": f"{a}+{b}=", "chosen": f"#### {a + b}", "rejected": f"{a + b}"} for a, b in sums]
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (root / "expert.jsonl").write_text("\n".join(json.dumps({"prompt": f"{a}+{b}=", "response": "+++"}) for a, b in sums))
    (root / "reward.py").write_text("def digits(response):\n    return sum(c.isdigit() for c in response) / 12\n")


def _train(tree: Path, root: Path, name: str, age: str) -> None:
    parts = dict(RUNS[name])
    if parts.get("algorithm", {}).get("name") != "dpo":
        parts["reward"] = {"functions": {"reward.py:digits": 1.0}}
    run = _merge(_merge(COMMON, {"model": {"path": "model"}, "data": {"train": ["data/train.parquet"]}}), parts)
    if run["algorithm"]["name"] != "grpo":
        run["algorithm"] = parts["algorithm"]
    run["trainer"] = run["trainer"] | {"run_dir": f"{name}-{age}"}
    (root / f"{name}.yaml").write_text(yaml.safe_dump(run))
    _fivefold(tree, root, ["train", f"{name}.yaml"])


def _resume(tree: Path, root: Path, name: str) -> list[dict[str, float]]:
    """Metrics of the older commit's run, which begins again at its checkpoint of step 2 with the sources of a tree."""
    run_dir = root / f"{name}-older"
    (run_dir / "checkpoints/latest").write_text("step-000002")
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000002":
            checkpoint.rename(root / f"{name}-{checkpoint.name}")
    output = _fivefold(tree, root, ["train", f"{name}.yaml", f"trainer.run_dir={name}-older"])
    if "resumed after step 2" not in output:
        raise RuntimeError("the run did not resume after step 2")
    return _metrics(run_dir)


def _fivefold(tree: Path, root: Path, command: list[str]) -> str:
    """Output of a command with the sources of a tree."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        [Path(sys.executable).with_name("fivefold"), *command],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"`fivefold {' '.join(command)}` with {tree} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _merge(common: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(common[key], value) for key, value in changes.items() if isinstance(value, dict) and key in common}
    return common | changes | both


def _metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _compare(older: list[dict[str, float]], newer: list[dict[str, float]]) -> tuple[float, str, str]:
    """Largest relative difference (absolute below 1), what was compared, and metrics that one commit writes alone."""
    if [row["step"] for row in older] != [row["step"] for row in newer]:
        raise RuntimeError(f"steps {[row['step'] for row in older]} became {[row['step'] for row in newer]}")
    names = [{key for row in rows for key in row if not key.startswith(TIMES)} for rows in (older, newer)]
    worst, values, where = 0.0, 0, ""
    for before, after in zip(older, newer, strict=True):
        for key in names[0] & names[1] & before.keys():
            difference = abs(after[key] - before[key]) / max(1.0, abs(before[key]))
            values += 1
            if not difference <= worst:
                worst, where = difference, f" ({key} of step {before['step']})"
    apart = [f"; only {age}: {', '.join(sorted(extra))}" for age, extra in
             (("older", names[0] - names[1]), ("newer", names[1] - names[0])) if extra]  # fmt: skip
    return worst, f"{values} values of {len(names[0] & names[1])} metrics", where + "".join(apart)


if __name__ == "__main__":
    sys.exit(main())
