"""TRL's GRPOTrainer, as benchmarks/beside_trl.py starts it, takes the updates of Fivefold on the same samples."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import beside_trl
from fivefold.models.config_json import read_config
from tests.support.commands import fivefold
from tests.support.tiny_models import load_tensors
from tests.support.whole_runs import REWARD, make_model, train, write_run

pytestmark = pytest.mark.environments

LR = 1e-3
RUN = """
policy: {tokens_per_micro_batch: 200, optimizer: {weight_decay: 0}}
algorithm: {name: grpo, group_size: 8, clip_high: 0.28, kl: {coef: 0}}
data: {prompts_per_step: 4, max_response_tokens: 12}
engine: {backend: transformers}
trainer: {steps: 6, save_every: 6, eval_every: 0, logged_samples_per_step: all}
"""
"""TRL takes four samples at once with this budget, in eight micro-batches."""


def recorded(run_dir: Path) -> list[list[dict[str, Any]]]:
    """Return the groups of samples that a run was trained on, in its order."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines()):
        if row["kind"] == "train":
            groups.setdefault((row["step"], row["group"]), []).append(row)
    return [groups[key] for key in sorted(groups)]


def test_trl_takes_the_same_updates_on_the_same_samples(tmp_path, monkeypatch):
    import trl

    make_model(tmp_path)
    write_run(tmp_path, RUN, reward=REWARD.replace("(response)", "(response, ground_truth)"))
    rows, _ = train(tmp_path, "ours")
    assert fivefold("export", tmp_path / "runs/ours", tmp_path / "ours").returncode == 0
    groups = recorded(tmp_path / "runs/ours")
    pad = read_config(tmp_path / "model")["pad_token_id"]
    assert any(pad in sample["tokens"]["response"][:-1] for group in groups for sample in group)
    prompts = [{"prompt": [{"role": "user", "content": str(place)}], "ground_truth": ""} for place in range(len(groups))]
    asked: list[int] = []

    def tokenize(self: Any, messages: list[list[dict[str, str]]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        asked[:] = [int(message["content"]) for (message,) in messages]
        return [groups[place][0]["tokens"]["prompt"] for place in asked], None, {}

    def sampled(self: Any, ids: list[list[int]], *rest: Any, **named: Any) -> tuple[list[list[int]], None]:
        samples = {place: iter(groups[place]) for place in asked}
        return [next(samples[place])["tokens"]["response"] for place in asked], None

    def trained(self: Any, *rest: Any, run: Any = trl.GRPOTrainer.train) -> None:
        run(self, *rest)
        self.model.save_pretrained(tmp_path / "theirs")

    monkeypatch.setattr(beside_trl, "_rows", lambda files: prompts if files else [])
    monkeypatch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, shuffle_dataset=False))
    monkeypatch.setattr(trl.GRPOTrainer, "_tokenize_prompts", tokenize)
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", sampled)
    monkeypatch.setattr(trl.GRPOTrainer, "train", trained)
    beside_trl.train_with_trl(tmp_path / "run.yaml", [], tmp_path / "theirs")

    theirs = list(map(json.loads, (tmp_path / "theirs/metrics.jsonl").read_text().splitlines()))[1:]
    assert [row["reward/mean"] for row in theirs] == pytest.approx([row["reward/mean"] for row in rows], rel=1e-6)
    before, after = load_tensors(tmp_path / "model"), {side: load_tensors(tmp_path / side) for side in ("ours", "theirs")}
    moved = {
        side: torch.cat([(tensors[name] - before[name]).flatten() for name in before]) for side, tensors in after.items()
    }
    # With eps of 1e-4 a gradient's rounding of 1e-7 moves a weight by 0.001 of the rate in each of six updates. Without the
    # gradient of the pad token's embedding weights are up to nine rates apart.
    assert float((moved["ours"] - moved["theirs"]).abs().max()) < 0.02 * LR
    assert float(moved["ours"].abs().max()) > LR
