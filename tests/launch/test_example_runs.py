"""Runs of `examples/`, each by its own file: a tiny model, few rows and the layout in small, with Ray and vLLM's servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import fivefold
from tests.support.tiny_models import make_model, make_tokenizer
from tests.support.whole_runs import REWARD, metrics
from tests.support.zygote import THREADS

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.ray]

ROOT = Path(__file__).resolve().parents[2]
CACHE = "engine.vllm={kv_cache_memory_bytes: 67108864}"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Models of the examples' families, rows as GSM8K has them, and a reward that a random model earns now and then."""
    root = tmp_path_factory.mktemp("examples")
    # vLLM's attention on CPUs has no heads narrower than 32.
    sizes = {"head_dim": 32, "num_hidden_layers": 4}
    for name in ("qwen3", "qwen3_moe"):
        make_tokenizer(make_model(name, root / name, **sizes))
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "data_source": "openai/gsm8k",
            "reward_model": {"ground_truth": str(a + b)},
        }
        for a in range(8)
        for b in range(8)
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "reward.py").write_text(REWARD)
    return root


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    """None is there to be joined, and a run's own has a directory whose path is short enough for its sockets."""
    monkeypatch.setenv("TMPDIR", "/tmp")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def train(root: Path, name: str, example: str, model: str, *overrides: str) -> tuple[list[dict[str, float]], str]:
    """Two steps of an example in small."""
    done = fivefold(
        "train", ROOT / "examples" / example, f"model.path={root}/{model}", "policy.dtype=float32",
        f"data.train=[{root}/rows.jsonl]", f"data.val=[{root}/rows.jsonl]", "data.prompts_per_step=4",
        "data.max_prompt_tokens=32", "data.max_response_tokens=16", "policy.tokens_per_micro_batch=256",
        "eval.max_prompts=4",
        f'reward={{"functions": {{"{root}/reward.py:digits": 1.0}}}}', f"trainer.run_dir={root}/runs/{name}", "trainer.steps=2", "trainer.save_every=1",
        "trainer.eval_every=1", "trainer.device=cpu", "trainer.loggers=[console]", f"launch.threads={THREADS}", *overrides,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(root, name)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/logprob_diff_mean"] < 1e-3 for row in rows[1:])
    assert (root / f"runs/{name}/checkpoints/step-000002").is_dir()
    return rows, done.stdout


def test_areal_s_run_on_32_gpus_with_vllm_in_the_place_of_sglang(root):
    """Experts laid out apart from attention, servers next to the ranks, two steps ahead, on a Ray cluster."""
    rows, told = train(
        root, "areal", "qwen3-30b-a3b-areal-32gpus.yaml", "qwen3_moe", CACHE, "launch.ray={address: null, strategy: pack}",
        "launch.allocation=vllm:d1t2+megatron:(attn:d1p2t1c2|ffn:d1p2t1e2)",
    )  # fmt: skip
    assert "ranks 0-3, CPU" in told and "2 expert x 1 expert-tensor" in told
    assert "ahead    samples are at most 2 steps old" in told
    assert [row["async/staleness_max"] for row in rows[1:]] == [0, 1]


def test_roll_s_run_on_two_layouts(root):
    """The actor in interleaved stages, its reference without, vLLM in the same processes."""
    rows, told = train(
        root, "roll", "qwen3-30b-a3b-roll-two-layouts.yaml", "qwen3_moe", CACHE, "policy.backend=megatron:d1t2p2e2",
        "policy.megatron.pipeline={virtual_pipeline_model_parallel_size: 2}", "reference.backend=megatron:d4e2",
        "engine.backend=vllm:d2t2",
    )  # fmt: skip
    assert "         3     t1 p1 e1  d3 e1\n" in told
    # The reference is the policy before its first update.
    assert rows[1]["policy/kl_reference"] < 1e-5


def test_the_run_on_one_node_that_samples_ahead(root):
    rows, told = train(
        root, "apart", "qwen3-8b-apart.yaml", "qwen3", CACHE, "launch.allocation=vllm:d2t1+megatron:d1t2", "engine.max_num_seqs=8"
    )  # fmt: skip
    assert "server 1 of vllm:d2t1p1, started by rank 1" in told
    assert [row["async/staleness_max"] for row in rows[1:]] == [0, 1]


def test_the_run_on_a_ray_cluster(root):
    """Of the model and the data that its script makes."""
    made = root / "sums"
    for command in (
        ["data", "arithmetic", "--below", "10", "--out", made / "data"],
        ["train-tokenizer", "char", "--data", made / "data/train.parquet", "--out", made / "tokenizer"],
        [
            "init-model",
            "qwen3",
            "--tokenizer",
            made / "tokenizer",
            "--hidden",
            "64",
            "--layers",
            "2",
            "--out",
            made / "model",
        ],
    ):
        done = fivefold(*command)
        assert done.returncode == 0, done.stderr
    files = [f"data.{kind}=[{made}/data/{name}.parquet]" for kind, name in (("train", "train"), ("val", "test"))]
    done = fivefold(
        "train", ROOT / "examples/ray/sums.yaml", f"model.path={made}/model", *files, f"trainer.run_dir={root}/runs/sums"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks 0-3, CPU" in done.stdout
    assert [row["step"] for row in metrics(root, "sums")] == [0, 1, 2, 3]


def test_on_ray_ahead_with_servers_next_to_ranks_that_hold_other_models_only(root):
    """The one-node example as a PPO run: the policy, its critic and its reference on ranks of their own."""
    rows, told = train(
        root, "all", "qwen3-8b-apart.yaml", "qwen3", CACHE, "launch.backend=ray",
        "launch.allocation=vllm[rollout]:d2t1+megatron[actor]:d1t1+megatron[ref]:d1t1+megatron[critic]:d1t1",
        "algorithm={name: ppo, kl: {coef: 0.01}, rollout_correction: {name: tis}}", "engine.max_num_seqs=8",
    )  # fmt: skip
    assert "ranks 0-2, CPU" in told and "server 1 of vllm:d2t1p1, started by rank 0" in told
    assert [row["async/staleness_max"] for row in rows[1:]] == [0, 1]
    assert all(row["critic/loss"] > 0 for row in rows[1:])
