"""Whole runs on `fsdp:` layouts: the same numbers as on Megatron-Core, also after a kill and with mixed backends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.commands import fivefold
from tests.support.tiny_models import make_model as make_model_of
from tests.support.whole_runs import assert_same, kill_run, make_model, train, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
critic: {optimizer: {lr: 2.0e-3, eps: 1.0e-4}, warmup_steps: 1}
algorithm: {name: ppo, group_size: 2, updates_per_step: 2, lam: 0.95, kl: {coef: 0.05, place: reward, estimator: k1}}
data: {prompts_per_step: 8, max_response_tokens: 12}
trainer: {steps: 4, save_every: 2}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fsdp")
    make_model(root)
    write_run(root, RUN)
    return root


@pytest.fixture(scope="module")
def base(root):
    return train(root, "base")[0]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("d2", ["policy.backend=fsdp:d2"]),
        ("d2c2", ["policy.backend=fsdp:d2c2", "policy.fsdp.replicas=2", "policy.fsdp.keep_gathered=true"]),
        ("mixed", ["policy.backend=fsdp:d1t2", "critic.backend=megatron:d2", "reference.backend=fsdp:c2"]),
    ],
)
def test_a_run_on_fsdp_has_the_numbers_of_one_on_megatron_core(root, base, name, overrides):
    assert_same(train(root, name, *overrides)[0], base)


def test_a_family_without_a_file_here_trains_and_samples(root, tmp_path):
    """Gemma 2: soft caps, windows, its own names; the engine is transformers', and the log-prob gate compares the two."""
    directory, tokenizer = make_model_of("gemma2", tmp_path / "gemma2", vocab_size=64), root / "model"
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, directory / file.name)
    overrides = [f"model.path={directory}", "policy.backend=fsdp:d2", "algorithm={name: grpo, group_size: 2}"]
    rows, output = train(root, "gemma2", *overrides, "trainer.steps=2", "trainer.save_every=0")
    assert len(rows) == 2 and all(row["policy/grad_norm"] > 0 for row in rows)
    assert "gemma2, " in output


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_in_the_ranks_samples_with_the_weights_of_every_step(tmp_path, dtype):
    """The log-probs of vLLM are those of the trainer: within rounding of bfloat16, whose products keep 9 bits."""
    root = tmp_path
    make_model(root, hidden=128)
    write_run(root, RUN)
    overrides = ["policy.backend=fsdp:d2", f"policy.dtype={dtype}", "engine.backend=vllm:d2", "engine.max_num_seqs=8"]
    cache = "engine.vllm={kv_cache_memory_bytes: 33554432}"
    rows, _ = train(root, f"vllm-{dtype}", *overrides, cache, "algorithm={name: grpo, group_size: 2}", "trainer.steps=3")
    bound = 1e-4 if dtype == "float32" else 2**-6
    assert all(row["policy/grad_norm"] > 0 and row["rollout/logprob_diff_mean"] < bound for row in rows), rows


def test_a_killed_run_resumes_on_another_fsdp_layout_with_the_same_numbers(root, base):
    kill_run(root, "killed", 2, "policy.backend=fsdp:d2")
    assert_same(train(root, "killed", "policy.backend=fsdp:d1c2")[0], base)
    out = root / "exported"
    done = fivefold("export", root / "runs/killed", out)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("first", "second"), [("megatron:d1p2", "fsdp:d2"), ("fsdp:d2", "megatron:d1t2")])
def test_a_killed_run_resumes_on_the_other_trainer_with_the_same_numbers(root, base, first, second):
    """Policy and critic change the trainer together, each with its moments."""
    name = f"from-{first.partition(':')[0]}"
    kill_run(root, name, 2, f"policy.backend={first}")
    assert_same(train(root, name, f"policy.backend={second}")[0], base)
