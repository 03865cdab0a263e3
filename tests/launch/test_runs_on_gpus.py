"""Whole runs on two GPUs from the command line: methods, resumes on another layout, exports."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import fivefold, program
from tests.support.whole_runs import make_judge, make_model, make_pairs, metrics

pytestmark = pytest.mark.gpu

RUN = """
model: {{path: {root}/model}}
policy: {{backend: "megatron:t2", dtype: bfloat16, tokens_per_micro_batch: {tokens}, optimizer: {{lr: 1.0e-4}}}}
algorithm: {{name: grpo, group_size: {group}, kl: {{coef: 0.01}}}}
data:
  train: [{root}/data/train.parquet]
  val: [{root}/data/test.parquet]
  prompts_per_step: {prompts}
  max_prompt_tokens: 16
  max_response_tokens: {response}
reward: {{functions: {{format: 1.0, "{root}/reward.py:digits": 1.0}}}}
trainer: {{run_dir: {root}/runs/grpo, steps: 2, device: {device}, loggers: [console]}}
launch: {{threads: {threads}}}
"""
# A model that was never trained has no right answer: without this nothing would have an advantage.
REWARD = """
def digits(response):
    return sum(c.isdigit() for c in response) / 64
"""
LARGE = {"tokens": 4096, "group": 8, "prompts": 32, "response": 64, "device": "cuda", "threads": 2}
TINY = {"tokens": 256, "group": 2, "prompts": 8, "response": 12, "device": "cpu", "threads": 1}
MODEL = {"hidden": 128, "layers": 4, "ffn": 384, "rows": 1024}
RESUMED = ("policy.backend=megatron:p2", "trainer.steps=3")
PPO = ("algorithm.name=ppo", "critic.warmup_steps=1")
VLLM = ("engine.backend=vllm:d2", "engine.memory_fraction=0.1", "engine.vllm={enforce_eager: true}")


@pytest.fixture(scope="module")
def root(gpus, tmp_path_factory) -> Path:
    gpus.require("megatron:d2")
    root = tmp_path_factory.mktemp("runs-on-gpus")
    make_model(root, **(MODEL if gpus.large else {}))
    (root / "reward.py").write_text(REWARD)
    (root / "run.yaml").write_text(RUN.format(root=root, **(LARGE if gpus.large else TINY)))
    return root


def train(root: Path, name: str, *commands: tuple[str, ...]) -> list[dict[str, float]]:
    """The metrics of a run that one command began and the others continued with, each as a user starts it."""
    for overrides in commands:
        done = program("fivefold.cli", "train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(root, name)
    assert all(math.isfinite(value) for row in rows for value in row.values()), rows
    return rows


@pytest.fixture(scope="module")
def runs(gpus, root):
    """name of a run -> its metrics, by `result()`.

    On GPUs all of them run at once: most of their time is the start of interpreters, and they need few megabytes.
    """
    pairs = make_pairs(root)
    dpo = (
        "algorithm={name: dpo}", f"policy.optimizer.lr={1e-3 if gpus.large else 1e-2}", f"data.train={pairs}",
        f"data.val={pairs}", "trainer.eval_every=2", "trainer.steps=4",
    )  # fmt: skip
    commands: dict[str, list[tuple[str, ...]]] = {
        "grpo": [(), RESUMED],
        "ppo": [PPO, (*PPO, *RESUMED)],
        "dapo": [("algorithm.name=dapo", "algorithm.sampling_rounds=3", "policy.backend=megatron:d2", "trainer.steps=1")],
        "dpo": [dpo],
        "fsdp": [("policy.backend=fsdp:d2",), ("policy.backend=megatron:d2", "trainer.steps=3")],
        "judged": [("algorithm.name=ppo", "policy.backend=megatron:d2", f"reward.model.path={make_judge(root)}")],
    }
    with ThreadPoolExecutor(len(commands) if gpus.large else 1) as pool:
        yield {name: pool.submit(train, root, name, *arguments) for name, arguments in commands.items()}


def assert_engine_agrees(rows: list[dict[str, float]]) -> None:
    """The engine's log-probs are the trainer's but for bfloat16: 3 bits more than the 2^-9 that a product is rounded to."""
    for row in rows:
        if "rollout/logprob_diff_mean" in row:
            assert row["rollout/logprob_diff_mean"] < 2**-6


def assert_exported(gpus, root: Path, run: str, part: str, kind: str) -> None:
    """What is exported loads in transformers, and is what a model streams that read the checkpoint on two GPUs."""
    import transformers

    checkpoint, out = root / "runs" / run / "checkpoints/step-000003", root / f"{run}-{part}"
    done = fivefold("export", checkpoint, out, "--model", part)
    assert done.returncode == 0, done.stderr
    model = getattr(transformers, kind).from_pretrained(out, dtype=torch.bfloat16)
    tensors = load_file(out / "model.safetensors")
    loaded = model.state_dict()
    for streamed in gpus.run(stream, "megatron:t2", checkpoint, part):
        assert streamed.keys() == tensors.keys()
        for name, tensor in streamed.items():
            assert torch.equal(tensor, tensors[name]) and torch.equal(tensor, loaded[name].to(tensor.dtype)), name


def stream(mesh, checkpoint: Path, part: str) -> dict[str, torch.Tensor]:
    from fivefold.config import RunConfig
    from fivefold.megatron.model import MegatronModel

    config = RunConfig.from_yaml(checkpoint / "run.yaml")
    critic = part == "critic"
    settings = config.critic.settings(config.policy) if critic else config.policy
    model = MegatronModel(Path(config.model.path), settings, mesh, read_weights=False, value_head=critic)
    model.load(checkpoint / part)
    return {name: tensor.to("cpu", copy=True) for name, tensor in model.weights()}


def test_grpo_on_t2_continues_on_p2_and_is_exported(gpus, root, runs):
    rows = runs["grpo"].result()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["policy/grad_norm"] > 0 and "rollout/logprob_diff_mean" in row for row in rows[1:])
    assert_engine_agrees(rows)
    assert_exported(gpus, root, "grpo", "policy", "AutoModelForCausalLM")


def test_ppo_on_t2_continues_on_p2_and_its_critic_is_exported(gpus, root, runs):
    rows = runs["ppo"].result()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # The first step only warms the critic up.
    assert ["policy/loss" in row for row in rows[1:]] == [False, True, True]
    assert all("critic/loss" in row for row in rows[1:])
    assert_engine_agrees(rows)
    assert_exported(gpus, root, "ppo", "critic", "AutoModelForSequenceClassification")


def test_grpo_on_fsdp_continues_on_megatron(runs):
    rows = runs["fsdp"].result()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert_engine_agrees(rows)


def test_vllm_in_the_ranks_samples_with_the_weights_of_fsdp(root):
    pytest.importorskip("vllm")
    rows = train(root, "fsdp-vllm", ("policy.backend=fsdp:d2", *VLLM))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert_engine_agrees(rows)


def test_vllm_in_the_ranks_shares_its_tensors_over_two_gpus(root):
    pytest.importorskip("vllm")
    rows = train(root, "vllm-t2", (*VLLM, "engine.backend=vllm:d1t2"))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert_engine_agrees(rows)


def test_dapo_on_d2_takes_its_step(runs):
    rows = runs["dapo"].result()
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["dynamic_sampling/rounds"] >= 1 and "policy/loss" in rows[1]
    assert_engine_agrees(rows)


def test_dpo_on_t2_learns_its_pairs(runs):
    rows = runs["dpo"].result()
    # Policy and reference are one at first.
    assert rows[0]["step"] == 0 and rows[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert rows[-1]["step"] == 4
    assert rows[-1]["val/loss"] < 0.69 and rows[-1]["val/accuracy"] > 0.9


def test_ppo_with_a_reward_model_on_d2_tells_its_scores(runs):
    rows = runs["judged"].result()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["reward/model"] != 0 and "policy/loss" in row and "critic/loss" in row for row in rows[1:])
    assert_engine_agrees(rows)
