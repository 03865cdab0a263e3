"""The demo, shortened: a warm start that is right now and then, and GRPO that makes it right more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import fivefold
from tests.support.whole_runs import metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "engine", "trainer"),
    [
        ("grpo", "transformers", "megatron:t2"),
        ("grpo", "transformers", "fsdp:d2"),
        ("prime", "transformers", "megatron:t2"),
        pytest.param("grpo", "vllm:d1t2", "megatron:t2", marks=pytest.mark.vllm),
    ],
)
def test_a_method_raises_the_reward_of_a_warm_started_model(tmp_path, method, engine, trainer):
    """The warm start is trained on the same layout; with `fsdp:` nothing of the run is Megatron-Core's."""

    def do(*arguments: object) -> None:
        done = fivefold(*arguments)
        assert done.returncode == 0, done.stderr

    data = [f"data.train={tmp_path}/data/train.parquet", f"data.val={tmp_path}/data/test.parquet"]
    do("data", "arithmetic", "--below", 10, "--limit", 75, "--out", tmp_path / "data")
    do("train-tokenizer", "char", "--data", tmp_path / "data/train.parquet", "--out", tmp_path / "tokenizer")
    do(
        "init-model",
        "qwen3",
        "--tokenizer",
        tmp_path / "tokenizer",
        "--hidden",
        128,
        "--layers",
        2,
        "--out",
        tmp_path / "model",
    )
    warm = [f"model.path={tmp_path}/model", *data, f"trainer.run_dir={tmp_path}/runs/sft", "data.prompts_per_step=75"]
    warm.append(f"policy.backend={trainer}")
    do("train", EXAMPLES / "sft.yaml", *warm, "trainer.steps=45", "trainer.eval_every=0", "trainer.stop_at={}")
    do("export", tmp_path / "runs/sft/checkpoints/step-000045", tmp_path / "warm")
    run = [f"model.path={tmp_path}/warm", *data, f"trainer.run_dir={tmp_path}/runs/grpo", f"policy.backend={trainer}"]
    run.append(f"engine.backend={engine}")
    if method == "prime":
        run += ["algorithm={name: prime, group_size: 8, process_reward: {coef: 1}}", "prm.backend=megatron:d2"]
        run += ["prm.optimizer.lr=1.0e-3", "prm.updates_per_step=4"]
    do("train", EXAMPLES / "grpo.yaml", *run, "trainer.steps=60", "trainer.eval_every=0", "trainer.stop_at={}")
    rows = [row for row in metrics(tmp_path, "grpo") if row["step"] > 0]
    rewards = [row["reward/mean"] for row in rows]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert 0.02 < first < 0.7, rewards
    assert last > first + 0.15, rewards
    if method == "prime":
        pairs = [row["prm/pair_accuracy"] for row in rows[-10:]]
        assert sum(pairs) / 10 > 0.5, pairs
