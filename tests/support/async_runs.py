"""A run that samples ahead with servers of vLLM, and what holds after it, however it was interrupted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support.commands import Command
from tests.support.whole_runs import make_model, metrics, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 2048}
engine: {backend: "vllm:d1", mode: server, vllm: {kv_cache_memory_bytes: 67108864}}
algorithm: {name: grpo, group_size: 4, kl: {coef: 0.01}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 8, max_response_tokens: 48}
eval: {max_prompts: 4}
trainer: {steps: 8, eval_every: 4, save_every: 2, keep: 9, device: cpu, logged_samples_per_step: 99}
"""
STEPS, PROMPTS = 8, 64
ENDLESS = [
    "data.max_response_tokens=120", "engine.sampling.ignore_eos=true", "engine.max_num_seqs=4", "policy.tokens_per_micro_batch=8192"
]  # fmt: skip
"""Responses of which so few are sampled at once that a step's take longer than the rest of it."""


def make_run(root: Path) -> Path:
    """Write the model, the data and the configuration below `root`, and return it."""
    make_model(root, hidden=64, heads=2, rows=PROMPTS)
    write_run(root, RUN)
    return root


def command(root: Path, name: str, *overrides: str) -> Command:
    return Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides)


def finished(root: Path, process: Command, name: str) -> list[dict[str, float]]:
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(root, name)


def check_ages_and_prompts(root: Path, name: str, max_staleness: int, steps: int = STEPS) -> list[dict[str, float]]:
    """Nothing too old was used, and every prompt of the epoch exactly once."""
    rows = metrics(root, name)[1:]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["async/staleness_max"] <= max_staleness
        # One optimizer step a step: the ages by the tokens' versions and by steps are the same.
        assert row["rollout/staleness_max"] == row["async/staleness_max"]
    lines = (root / f"runs/{name}/samples.jsonl").read_text().splitlines()
    used = Counter(row["prompt_id"] for row in map(json.loads, lines) if row["kind"] == "train")
    assert set(used.values()) == {1} and len(used) == PROMPTS, used
    state = json.loads((root / f"runs/{name}/checkpoints/step-{steps:06d}/state.json").read_text())["rollouts"]
    assert (state["position"], state.get("unused", [])) == (PROMPTS, [])
    return rows
