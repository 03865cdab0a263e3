"""Whole runs of a mixture of experts that replay routes: of the engine, of the old policy, ahead of the trainer and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.launch.test_async_runs import WHEN, without
from tests.support import tiny_models
from tests.support.whole_runs import assert_same, kill_run, make_model, train, write_run

RUN = """
model: {path: $ROOT/experts}
policy: {backend: "megatron:d1", tokens_per_micro_batch: 512, router_replay: R3, optimizer: {lr: 3.0e-3}}
algorithm: {name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.01}}
data: {prompts_per_step: 4, max_response_tokens: 8}
trainer: {steps: 4, save_every: 1, keep: 9}
"""
AHEAD = ("rollout.max_staleness=2", "algorithm.rollout_correction.name=tis")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    import transformers

    root = tmp_path_factory.mktemp("replay")
    make_model(root, rows=40)
    words = transformers.AutoTokenizer.from_pretrained(root / "model")
    tiny_models.make_model("qwen3_moe", root / "experts", vocab_size=len(words), num_hidden_layers=2)
    words.save_pretrained(root / "experts")
    write_run(root, RUN)
    return root


@pytest.fixture(scope="module")
def base(root):
    return train(root, "base")[0]


@pytest.fixture(scope="module")
def ahead(root):
    return train(root, "ahead", *AHEAD)[0]


def test_with_one_update_engine_and_trainer_choose_the_same_experts(root):
    """In float32, by the same weights."""
    rows, _ = train(root, "one", "algorithm.updates_per_step=1")
    assert [row["moe/router_agreement"] for row in rows] == [1.0] * 4
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-5


@pytest.mark.parametrize("layout", ["d2", "t2e2", "p2"])
def test_a_run_that_replays_is_the_same_on_every_layout(root, base, layout):
    assert all(0.5 < row["moe/router_agreement"] <= 1 for row in base)
    assert_same(train(root, layout, f"policy.backend=megatron:{layout}")[0], base, rel=1e-4)


def test_of_fresh_samples_both_ways_of_replay_are_the_same_run(root, base):
    """The weights that sampled are those of the old log-probs; the last token of a sequence, which no one looks at, was read by
    the trainer only."""
    rows, _ = train(root, "R2", "policy.router_replay=R2")
    assert_same(without(rows, "moe/"), without(base, "moe/"), rel=1e-4)


def test_a_run_ahead_that_was_killed_continues_with_the_routes_that_wait(root, ahead):
    assert min(row["moe/router_agreement"] for row in ahead) < 1, "older weights have sampled"
    kill_run(root, "killed", 2, *AHEAD)
    rows, _ = train(root, "killed", *AHEAD, "policy.backend=megatron:d2")
    assert_same(without(rows, *WHEN), without(ahead, *WHEN), rel=1e-4)
    with safe_open(root / "runs/killed/checkpoints/step-000002/rollouts/groups-00000.safetensors", "pt") as file:
        assert file.get_tensor("routes_TLK").dtype == torch.int8
