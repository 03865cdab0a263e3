"""What a run has learned from can be computed again from samples.jsonl alone, by a program that shares no formula with it.

The program is `Audit`, in float64, from the papers: GRPO (2402.03300), GAE (1506.02438), truncated importance sampling.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import fivefold
from tests.support.whole_runs import make_model, write_run

LAYOUTS = ["d1", "d2", "t2", "p2"]
RUN = """
policy: {tokens_per_micro_batch: 64}
data: {prompts_per_step: 8, max_response_tokens: 12}
trainer: {steps: 3, logged_samples_per_step: all, resume: never}
"""
METHODS = {
    # Nothing else needs the log-probs before the step's one update.
    "grpo": ["algorithm={name: grpo, group_size: 4, kl: {coef: 0}}"],
    "ppo": [
        "algorithm={name: ppo, group_size: 2, updates_per_step: 2, gamma: 0.99, lam: 0.9, "
        "kl: {coef: 0.05, place: reward, estimator: k1}}",
        "critic.optimizer.lr=1.0e-2",
    ],
    # The engine's weights are rounded, so that there is something to correct.
    "corrected": [
        "algorithm={name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.1}, rollout_correction: {name: tis, high: 1.001, "
        "reject: geometric, reject_low: 0.9998, reject_high: 1.0002}}",
        "engine.dtype=bfloat16",
        "engine.max_logprob_diff=1",
    ],
}


class Audit:
    """Advantages and the loss of a step's first update, from its rows."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = [row for row in rows if row["used"] and not row["failed"]]
        self.first = [row for row in self.rows if row["update"] == 0]

    def column(self, row: dict[str, Any], name: str) -> np.ndarray:
        return np.array(row["tokens"][name], dtype=np.float64)

    def tokens(self, name: str, rows: list[dict[str, Any]] | None = None) -> np.ndarray:
        return np.concatenate([self.column(row, name) for row in (self.rows if rows is None else rows)])

    def group_advantages(self) -> np.ndarray:
        rewards = np.array([row["reward"] for row in self.rows])
        groups = np.array([row["group"] for row in self.rows])
        advantages = np.zeros(len(rewards))
        for group in set(groups):
            rewards_of_group = rewards[groups == group]
            advantages[groups == group] = (rewards_of_group - rewards_of_group.mean()) / (
                rewards_of_group.std(ddof=1) + 1e-6
            )
        return np.concatenate([np.full(row["response_tokens"], a) for row, a in zip(self.rows, advantages, strict=True)])

    def gae(self, gamma: float, lam: float, kl: float) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns): whitened over the step, with the KL to the reference taken off each token's reward."""
        advantages, returns = [], []
        for row in self.rows:
            rewards = -kl * (self.column(row, "old_logprobs") - self.column(row, "ref_logprobs"))
            rewards[-1] += row["reward"]
            values = self.column(row, "values")[:-1]
            advantages_of_row, after, rest = np.zeros(len(rewards)), 0.0, 0.0
            for place in reversed(range(len(rewards))):
                rest = rewards[place] + gamma * after - values[place] + gamma * lam * rest
                advantages_of_row[place], after = rest, values[place]
            advantages.append(advantages_of_row)
            returns.append(advantages_of_row + values)
        joined = np.concatenate(advantages)
        return (joined - joined.mean()) / math.sqrt(joined.var(ddof=1) + 1e-8), np.concatenate(returns)

    def of_first(self, by_token: np.ndarray) -> np.ndarray:
        """The part of a number of all tokens that belongs to the first update."""
        is_first = np.concatenate([np.full(row["response_tokens"], row["update"] == 0) for row in self.rows])
        return by_token[is_first]

    def sequence_mean(self) -> np.ndarray:
        """Weight of each token: the mean of each response, and of these the mean."""
        lengths = [row["response_tokens"] for row in self.first]
        return np.concatenate([np.full(length, 1 / (length * len(lengths))) for length in lengths])

    def correction(self) -> tuple[np.ndarray, np.ndarray]:
        """(weights of tokens, whether their response is kept)."""
        weights, kept = [], []
        for row in self.rows:
            difference = self.column(row, "old_logprobs") - self.column(row, "rollout_logprobs")
            weights.append(np.minimum(np.exp(difference), 1.001))
            kept.append(np.full(len(difference), float(0.9998 <= math.exp(difference.mean()) <= 1.0002)))
        return np.concatenate(weights), np.concatenate(kept)


def grpo(audit: Audit) -> tuple[dict[str, np.ndarray], float]:
    advantages = audit.group_advantages()
    # The ratio is 1 in the first update.
    return {"advantages": advantages}, -float((audit.sequence_mean() * audit.of_first(advantages)).sum())


def ppo(audit: Audit) -> tuple[dict[str, np.ndarray], float]:
    advantages, returns = audit.gae(0.99, 0.9, 0.05)
    return {"advantages": advantages, "returns": returns}, -float(audit.of_first(advantages).mean())


def corrected(audit: Audit) -> tuple[dict[str, np.ndarray], float]:
    advantages, (weights, kept) = audit.group_advantages(), audit.correction()
    ratio = audit.tokens("ref_logprobs", audit.first) - audit.tokens("old_logprobs", audit.first)
    objective = audit.of_first(weights * advantages) - 0.1 * (np.exp(ratio) - ratio - 1)
    loss = -float((audit.sequence_mean() * audit.of_first(kept) * objective).sum())
    return {"advantages": advantages, "correction_weights": weights, "correction_kept": kept}, loss


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("audit")
    make_model(root)
    write_run(root, RUN)
    return root


def run(root: Path, method: str, layout: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of samples.jsonl, rows of metrics.jsonl)."""
    run_dir = root / "runs" / f"{method}-{layout}"
    if not run_dir.exists():
        overrides = [f"trainer.run_dir={run_dir}", f"policy.backend=megatron:{layout}"]
        done = fivefold("train", root / "run.yaml", *overrides, *METHODS[method])
        assert done.returncode == 0, done.stdout + done.stderr
    return tuple(
        [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        for name in ("samples.jsonl", "metrics.jsonl")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", [grpo, ppo, corrected])
def test_another_program_finds_the_advantages_and_the_loss_from_the_samples(root, method, layout):
    rows, metrics = run(root, method.__name__, layout)
    losses = {row["step"]: row["policy/loss"] for row in metrics}
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    for step in (1, 2, 3):
        rows_of_step = [row for row in rows if row["step"] == step]
        assert len(rows_of_step) == (16 if method is ppo else 32)
        audit = Audit(rows_of_step)
        expected, loss = method(audit)
        for name, numbers in expected.items():
            assert audit.tokens(name) == pytest.approx(numbers, rel=2e-5, abs=2e-6), (step, name)
        # A group's mean of rewards is 0 up to rounding: so is a loss of equal lengths.
        assert audit.first[0]["update_loss"] == pytest.approx(loss, rel=2e-5, abs=2e-7), step
        if method is grpo:
            assert losses[step] == pytest.approx(loss, rel=2e-5, abs=2e-7)
        if method is corrected:
            weights, kept = expected["correction_weights"], expected["correction_kept"]
            assert (weights == 1.001).any() and (weights < 1).any() and 0 < kept.mean() < 1, (
                "there must be something to correct"
            )


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_the_rows_of_an_audit_are_the_same_on_every_layout(root, layout):
    def texts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**row, "wall": 0, "update_loss": 0, "tokens": {**row["tokens"], **dict.fromkeys(numbers, 0)}} for row in rows
        ]

    numbers = ("rollout_logprobs", "old_logprobs", "advantages", "returns")
    assert texts(run(root, "grpo", layout)[0]) == texts(run(root, "grpo", "d1")[0])


def test_an_audit_changes_no_number_of_the_run(root):
    run_dir = root / "runs/plain"
    plain = ["trainer.logged_samples_per_step=2", f"trainer.run_dir={run_dir}", "policy.backend=megatron:d1"]
    done = fivefold("train", root / "run.yaml", *plain, *METHODS["grpo"])
    assert done.returncode == 0, done.stdout + done.stderr

    def learned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {key: row[key] for key in row if key.startswith(("policy/", "reward/", "rollout/", "response/"))} for row in rows
        ]

    rows_of_run = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert learned(rows_of_run) == learned(run(root, "grpo", "d1")[1])
    assert len((run_dir / "samples.jsonl").read_text().splitlines()) == 6
