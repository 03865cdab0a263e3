"""Whole runs of several domains, each with its own rewards and a judge that is a real process: they resume exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.reward.test_judge import SERVER
from tests.support.whole_runs import assert_same, make_model, write_run
from tests.support.whole_runs import train as train_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
algorithm: {name: reinforce_plus_plus, group_size: 2, updates_per_step: 2, whiten_by: domain, kl: {coef: 0.0}}
data:
  train: [$ROOT/rows.jsonl]
  prompts_per_step: 8
  max_response_tokens: 8
  source_key: tag
  ground_truth_key: truth
  domains: {sums: [plus, "*"], letters: [choice], judged: [judged]}
  mixture: {sums: 0.5, letters: 0.25, judged: 0.25}
reward:
  by_source: {choice: {multiple_choice: 0.0, multiple_choice_soft: 1.0, repetition: -0.5}, judged: {judge: 1.0, repetition: -0.5}}
  judge: {url: ["$SERVER"], model: judge, prompt: "{prompt} {response}"}
trainer: {steps: 4, save_every: 2, keep: 9, logged_samples_per_step: 8}
"""
OF_A_STEP = {"sums": 4, "letters": 2, "judged": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("run")
    make_model(root)
    # Fewer of the letters than two steps take: their epochs end within the run.
    rows = [{"prompt": f"{n}+1=", "tag": ("plus", "other")[n % 2], "truth": f"{n + 1}"} for n in range(11)]
    rows += [{"prompt": f"{n}+2=", "tag": "choice", "truth": "A"} for n in range(3)]
    rows += [{"prompt": f"{n}+3=", "tag": "judged", "truth": ""} for n in range(5)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    server = f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
    write_run(root, RUN.replace("$SERVER", server))
    yield root
    process.kill()
    process.wait()


def train(root: Path, name: str, *overrides: str):
    return train_run(root, name, *overrides)[0], samples(root, name)


def samples(root: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / "runs" / name / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(root):
    return train(root, "base")


def domain(row: dict) -> str:
    return {"1": "sums", "2": "letters", "3": "judged"}[row["prompt"].partition("=")[0].partition("+")[2]]


def test_every_step_has_the_prompts_and_rewards_of_each_domain(base):
    rows, drawn = base
    for step in range(1, 5):
        of_step = [row for row in drawn if row["step"] == step]
        assert Counter(map(domain, of_step)) == OF_A_STEP
        for row in of_step:
            parts = {"sums": 1, "letters": 3, "judged": 2}[domain(row)]
            assert len(row["reward_parts"]) == parts, row
    judged = [row["reward_parts"]["judge"] for row in drawn if domain(row) == "judged"]
    assert judged == [1.0] * len(judged), "the server says YES to everything"
    assert all("reward/judge" in row and "reward/multiple_choice_soft" in row for row in rows[1:] if row["step"])
    # Three prompts of the letters: each comes before any comes again.
    letters = [row["prompt"] for row in drawn if domain(row) == "letters"]
    assert all(len(set(letters[begin : begin + 3])) == 3 for begin in (0, 3))


def test_a_resumed_run_of_domains_continues_as_if_never_stopped_on_other_ranks(root, base):
    (expected, drawn), at = base, f"trainer.resume={root}/runs/base/checkpoints/step-000002"
    rows, again = train(root, "resumed", at, "policy.backend=megatron:d2")
    assert_same([row for row in rows if row["step"] > 2], [row for row in expected if row["step"] > 2])
    key = ("step", "prompt", "response", "reward")
    after = [[row[name] for name in key] for row in drawn if row["step"] > 2]
    # The first of two ranks writes down its own samples; the metrics are those of all.
    later_samples = [[row[name] for name in key] for row in again if row["step"] > 2]
    assert len(later_samples) >= 8 and all(row in after for row in later_samples)


@pytest.mark.slow
def test_a_run_of_domains_that_samples_ahead_of_nothing_draws_the_same(root, base):
    _, drawn = base
    _, again = train(root, "ahead", "rollout.max_staleness=0")
    key = ("step", "prompt", "response")
    assert sorted([row[name] for name in key] for row in again) == sorted([row[name] for name in key] for row in drawn)
