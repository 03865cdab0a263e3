"""Every method raises the reward of a small task from under 0.3 to over 0.8, through the real loop."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import methods
from tests.test_cli_runs import fivefold, make_model
from tests.toy import VOCAB, ToyEngine, ToyModel, ToyScorer, target, toy_prompts

GROUP = 8


def toy_run(mesh, run_dir: Path, name: str, choices: methods.Choices, **changes: Any):
    """(rewards of each step, of the policy before and after) of a run with the toy model and the real loop."""
    from fivefold.algo import Objective
    from fivefold.algo.values import ValueLoss
    from fivefold.checkpoint.manager import Checkpoints
    from fivefold.data import PromptLoader
    from fivefold.observability.run_logger import RunLogger
    from fivefold.rollout.groups import DynamicSampling, Rewards
    from fivefold.trainer.run import Run
    from fivefold.trainer.train import train
    from fivefold.types import Sampling

    chosen = methods.resolve(name, choices)
    objective, given = Objective.of(chosen), name in methods.OFFLINE_METHODS
    prompts = [
        replace(prompt, responses=prompt.responses[: 2 if name == "dpo" else 1]) if given else prompt
        for prompt in toy_prompts()
    ]
    policy = changes.pop("policy", None) or ToyModel()
    settings: dict[str, Any] = {
        "ranks": mesh.ranks, "observer": RunLogger(run_dir, [], True, 1), "policy": policy,
        "reference": ToyModel() if objective.needs_reference else None,
        "critic": ToyModel(value_head=True) if objective.needs_critic else None, "engine": None if given else ToyEngine(),
        "objective": objective, "value_loss": ValueLoss(), "critic_warmup": 0,
        "sampler": PromptLoader(prompts, 8, seed=1, shuffle=True), "given": given, "samples_per_comparison": 2 if name == "dpo" else 1,
        "group_size": GROUP, "refill": DynamicSampling(3, 8) if chosen.dynamic_sampling else None,
        "sampling": Sampling(max_tokens=5, seed=3), "rewards": Rewards(ToyScorer()), "evaluation": None,
        "checkpoints": Checkpoints(run_dir, 1), "run_dir": run_dir, "steps": 60, "seed": 3, "updates_per_step": 2, "epochs": 1,
        "max_logprob_diff": 1e-3, "save_every": 0, "eval_every": 0, "eval_before": False, "stop_at": {}, "samples_per_step": 0,
        "resume": "never", "flops": lambda tokens, length: 1.0, "stop_requested": lambda: False, "guard_every": 0,
        "max_skipped": 0, "profile_steps": [], "profile_this_rank": False, "resolved_config": "",
    }  # fmt: skip
    run = Run(**{**settings, **changes})

    def sampled() -> float:
        engine = ToyEngine()
        engine.update_weights(policy.weights(), 0)
        groups = engine.generate(prompts, 32, Sampling(max_tokens=5, seed=99))
        ToyScorer().score(groups)
        return sum(sample.reward for group in groups for sample in group.samples) / 32 / len(prompts)

    before = sampled()
    train(run)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()] if run.steps else []
    return rows, before, sampled(), run


def learned(mesh, run_dir: Path, name: str, choices: methods.Choices, steps: int = 60):
    rows, before, after, _ = toy_run(mesh, run_dir, name, choices, steps=steps)
    return rows, before, after


CHOICES = {
    # Its bounds are made for long responses of large models, which move by less than a toy does.
    "gspo": methods.Choices(clip_low=0.1, clip_high=0.1),
}


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_every_method_learns(cluster, tmp_path, name):
    ((rows, before, after),) = cluster.run(learned, "megatron:d1", tmp_path, name, CHOICES.get(name, methods.Choices()))
    assert before < 0.3 and after > 0.8, (before, after)
    assert rows[-1]["step"] == 60


EXTRAS = {
    "legacy": ("grpo", {"aggregate": "micro-batch-token-mean"}),
    "normalised by the step": ("grpo", {"normalize": "batch"}),
    "kl in the reward, adaptive": ("grpo", {"kl": methods.KLConfig(place="reward", estimator="k1", coef=0.01, target=0.5)}),
    "groups with a critic": ("ppo", {"advantage": "group", "lam": 0.95}),
    "straight-through kl": ("rloo", {"kl": methods.KLConfig(estimator="k1+", coef=0.001)}),
    **{
        name: ("grpo", {"rollout_correction": methods.CorrectionConfig(name=name)})
        for name in ("tis", "sequence_mis", "decoupled")
    },
    "engine as old policy": ("grpo", {"rollout_correction": methods.CorrectionConfig(old_logprobs_from="engine")}),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_choice_on_another_axis_learns_too(cluster, tmp_path, extra):
    name, choices = EXTRAS[extra]
    ((_, before, after),) = cluster.run(learned, "megatron:d1", tmp_path, name, methods.Choices(**choices), 150)
    assert before < 0.3 and after > 0.8, (before, after)


def test_pass_at_k_raises_the_best_of_a_group(cluster, tmp_path):
    """It stops where two of a group are best: the mean may stay behind, the best does not."""
    choices = methods.Choices(advantage="pass_at_k", normalize="none")
    ((rows, before, after),) = cluster.run(learned, "megatron:d1", tmp_path, "grpo", choices, 150)
    assert before < 0.3 and after > 0.6
    assert rows[0]["reward/best"] < 0.6 and sum(row["reward/best"] for row in rows[-10:]) / 10 > 0.95


def refilled(mesh, run_dir: Path, known: int):
    rows, *_, run = toy_run(mesh, run_dir, "dapo", methods.Choices(), steps=3, policy=knowing(known), group_size=32)
    return rows, run.position


def knowing(count: int) -> ToyModel:
    """A policy that always answers the first prompts right."""
    policy = ToyModel()
    for prompt in range(count):
        policy.table.data[prompt, :, target(prompt)] = 30.0
    return policy


@pytest.mark.parametrize(("known", "rounds", "silent"), [(0, 1, 0), (4, 2, 0), (6, 3, 2), (8, 3, 8)])
def test_dynamic_sampling_refills_up_to_its_limit(cluster, tmp_path, known, rounds, silent):
    """Eight prompts a round, of which those that are known have one reward only; three rounds at most."""
    ((rows, position),) = cluster.run(refilled, "megatron:d1", tmp_path, known)
    assert [(row["dynamic_sampling/rounds"], row["dynamic_sampling/zero_variance_used"]) for row in rows] == [
        (rounds, silent)
    ] * 3
    assert rows[0]["dynamic_sampling/kept_fraction"] == (8 - known) / 8
    assert rows[0]["reward/frac_reward_zero_std"] == silent / 8
    assert position == 3 * 8 * rounds == sum(row["dynamic_sampling/prompts"] for row in rows)
    if known == 8:
        assert rows[0]["policy/grad_norm"] == 0.0


def test_dynamic_sampling_takes_the_same_groups_on_every_number_of_replicas(cluster, tmp_path):
    one = cluster.run(first_groups, "megatron:d1", tmp_path / "one")[0]
    two = cluster.run(first_groups, "megatron:d2", tmp_path / "two")
    assert [item for pair in zip(*two, strict=True) for item in pair] == one


def first_groups(mesh, run_dir: Path):
    from fivefold.data import PromptLoader
    from fivefold.rollout.groups import DynamicSampling

    *_, run = toy_run(mesh, run_dir / str(mesh.ranks.rank), "dapo", methods.Choices(), steps=0)
    engine_run = replace(run, sampler=PromptLoader(toy_prompts(), 4, 1, True), refill=DynamicSampling(4, 4))
    engine_run.policy.table.data[:4, :, 1] += 9.0
    return [(group.prompt.id, [sample.token_ids for sample in group.samples]) for group in engine_run.collect()]


def several_epochs(mesh, run_dir: Path):
    rows, *_, run = toy_run(mesh, run_dir, "grpo", methods.Choices(), steps=4, epochs=3)
    return rows, run.policy.version


def test_several_epochs_move_away_from_the_policy_that_sampled_and_say_so(cluster, tmp_path):
    ((rows, version),) = cluster.run(several_epochs, "megatron:d1", tmp_path)
    assert version == 4 * 2 * 3
    for row in rows:
        # The mean over the step's updates starts from 0; the last one is farthest.
        assert row["policy/kl_old_last"] > row["policy/kl_old"] > 0
        assert row["policy/ratio_max"] > 1.1 and row["policy/clip_fraction"] > 0


def warmed_up(mesh, run_dir: Path):
    rows, _, _, run = toy_run(mesh, run_dir, "ppo", methods.Choices(), steps=3, critic_warmup=2)
    return rows, run.policy.version, run.critic.version


def test_a_critic_that_warms_up_learns_before_the_policy_moves(cluster, tmp_path):
    ((rows, policy, critic),) = cluster.run(warmed_up, "megatron:d1", tmp_path)
    assert (policy, critic) == (2, 6)
    assert ["policy/loss" in row for row in rows] == [False, False, True]
    assert all("critic/loss" in row and "critic/explained_variance" in row for row in rows)


def half_known(mesh, run_dir: Path):
    return toy_run(mesh, run_dir, "ppo", methods.Choices(), steps=40, critic_warmup=39, policy=knowing(4))[0]


def test_a_critic_comes_to_explain_the_returns_of_a_policy_that_stays(cluster, tmp_path):
    """Half of the prompts are always right, the others hardly ever: that is nearly all of the variance there is."""
    (rows,) = cluster.run(half_known, "megatron:d1", tmp_path)
    assert abs(rows[0]["critic/explained_variance"]) < 0.1
    assert rows[-1]["critic/explained_variance"] > 0.8
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"] / 4


def validation_losses(mesh):
    """Of a policy that knows nothing, by every aggregation that is a mean over tokens."""
    from fivefold.algo import Objective
    from fivefold.trainer.evaluation import Evaluation
    from fivefold.types import Sampling

    prompts = [replace(prompt, responses=prompt.responses[:1]) for prompt in toy_prompts()]
    evaluation = Evaluation(prompts, 0, Sampling(5), Sampling(5), generate=False, given=prompts)
    found = []
    for aggregate in ("token-mean", "seq-mean-token-mean", methods.LEGACY_AGGREGATE):
        objective = Objective.of(methods.resolve("sft", methods.Choices(aggregate=aggregate)))
        found.append(evaluation.losses(ToyModel(), None, objective, mesh.ranks)["val/loss"])
    return found


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_the_validation_loss_of_a_uniform_policy_is_the_log_of_its_vocabulary(cluster, layout):
    for losses in cluster.run(validation_losses, f"megatron:{layout}"):
        assert losses == pytest.approx([math.log(VOCAB)] * 3, rel=1e-6)


# --- with real Megatron-Core -----------------------------------------------------------------------------------------

REWARD = """
def sevens(response):
    return response.count("7") / 8
"""
RUN = """
model: {{path: {root}/model}}
policy: {{backend: "megatron:d1", dtype: float32, tokens_per_micro_batch: 2048, optimizer: {{lr: 3.0e-3}}}}
critic: {{optimizer: {{lr: 3.0e-3}}}}
algorithm: {{group_size: 8, updates_per_step: 2}}
data: {{train: [{root}/data/train.parquet], prompts_per_step: 8, max_prompt_tokens: 16, max_response_tokens: 8}}
reward: {{functions: {{"{root}/reward.py:sevens": 1.0}}}}
trainer: {{run_dir: {root}/runs/x, steps: 40, loggers: [console]}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("learn")
    make_model(root)
    (root / "reward.py").write_text(REWARD)
    (root / "run.yaml").write_text(RUN.format(root=root))
    return root


@pytest.mark.parametrize(("name", "layout"), [("grpo", "t2"), ("ppo", "d2"), ("dapo", "p2")])
def test_a_method_learns_on_megatron_core(root, name, layout):
    """Say 7: one of about twenty tokens at first."""
    done = fivefold(
        "train", root / "run.yaml", f"algorithm.name={name}", f"policy.backend=megatron:{layout}",
        f"trainer.run_dir={root}/runs/{name}", *(["algorithm.overlong_buffer=0"] if name == "dapo" else []),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (root / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if row["step"] > 0]
    assert rewards[0] < 0.3 and sum(rewards[-3:]) / 3 > 0.8, rewards
    if name == "ppo":
        assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/value_mean"} <= set(rows[-1])
