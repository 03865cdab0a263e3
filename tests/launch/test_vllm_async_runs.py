"""Whole runs that sample ahead with real servers of vLLM: bounded age, every prompt once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.async_runs import check_ages_and_prompts, command, finished, make_run
from tests.support.whole_runs import assert_same

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("servers"))


def test_nothing_ahead_with_a_server_is_the_synchronous_run(root):
    """Float32 on a CPU: what is drawn depends on the key of a request and on the weights alone."""
    runs = {name: command(root, name, *more) for name, more in {"base": [], "none": ["rollout.max_staleness=0"]}.items()}
    base, none = (finished(root, process, name) for name, process in runs.items())
    check_ages_and_prompts(root, "none", 0)
    assert_same([{k: v for k, v in row.items() if not k.startswith("async/")} for row in none], base)


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_more_groups_than_needed_are_cut(root, tail):
    given = ["rollout.max_staleness=1", f"rollout.tail={tail}", "rollout.oversample=0.5", "trainer.steps=4"]
    rows = finished(root, command(root, tail, *given), tail)[1:]
    assert all(row["async/staleness_max"] <= 1 for row in rows)
    lines = (root / f"runs/{tail}/samples.jsonl").read_text().splitlines()
    used = Counter(row["prompt_id"] for row in map(json.loads, lines) if row["kind"] == "train")
    assert set(used.values()) == {1} and len(used) == 32


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 4])
def test_two_ranks_and_two_engines_apart_raise_the_reward_ahead(root, max_staleness):
    """From random weights: the share of digits in what is sampled."""
    given = [
        "engine.backend=vllm:d2", "engine.placement=apart", "policy.backend=megatron:d2",
        f"rollout.max_staleness={max_staleness}", "trainer.steps=60", "trainer.epochs=8", "policy.optimizer.lr=2.0e-3",
        "algorithm.kl.coef=0", "algorithm.rollout_correction.old_logprobs_from=engine", "data.max_response_tokens=12",
        "trainer.eval_every=0", "trainer.save_every=0",
    ]  # fmt: skip
    rows = finished(root, command(root, f"learns-{max_staleness}", *given), f"learns-{max_staleness}")[1:]
    assert all(row["async/staleness_max"] <= max_staleness for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15, rewards
