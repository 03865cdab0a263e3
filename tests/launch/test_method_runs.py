"""Whole runs from the command line of methods with more than a policy: PPO, reward models, DPO, SFT on conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import fivefold
from tests.support.documented import undocumented
from tests.support.tiny_models import make_classifier
from tests.support.whole_runs import assert_same, kill_run, make_judge, make_model, make_pairs, train, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
critic: {optimizer: {lr: 2.0e-3, eps: 1.0e-4, decay_steps: 10}, warmup_steps: 1}
algorithm: {name: ppo, group_size: 2, updates_per_step: 2, lam: 0.95, kl: {coef: 0.05, place: reward, estimator: k1}}
data: {prompts_per_step: 8, max_response_tokens: 12}
trainer: {steps: 4}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("methods")
    make_model(root)
    write_run(root, RUN)
    return root


@pytest.fixture(scope="module")
def base(root):
    return train(root, "base", "trainer.save_every=2", "trainer.keep=9")[0]


def test_a_ppo_run_tells_what_its_critic_does(root, base):
    names = {
        "critic/loss",
        "critic/explained_variance",
        "critic/value_mean",
        "critic/return_mean",
        "critic/grad_norm",
        "critic/lr",
    }
    assert all(names <= set(row) for row in base)
    assert undocumented(name for row in base for name in row) == []
    # The first step only warms the critic up.
    assert ["policy/loss" in row for row in base] == [False, True, True, True]
    assert {"policy/kl_old", "policy/kl_old_last", "policy/ratio_max", "policy/clip_fraction", "policy/kl_reference"} <= set(
        base[-1]
    )
    assert {
        "reward/pass@2",
        "reward/mean@2",
        "reward/solve_none",
        "response/repetition",
        "response/length_std",
    } <= set(base[-1])
    kept = sorted(path.name for path in (root / "runs/base/checkpoints/step-000002").iterdir())
    assert {"policy", "critic"} <= set(kept)


def on_layouts(policy: str, reference: str, critic: str) -> list[str]:
    """Overrides: each model on a layout of its own."""
    layouts = {"policy": policy, "reference": reference, "critic": critic}
    return [f"{role}.backend=megatron:{layout}" for role, layout in layouts.items()]


@pytest.mark.parametrize("layouts", [("d2", "t2", "p2"), ("c2", "d2", "c2")], ids="-".join)
def test_a_ppo_run_has_the_same_metrics_on_other_layouts(root, base, layouts):
    assert_same(train(root, "-".join(layouts), *on_layouts(*layouts))[0], base)


@pytest.fixture(scope="module")
def resumed(root):
    kill_run(root, "resumed", 2, "trainer.save_every=2", *on_layouts("p2", "d2", "t2"))
    rows, told = train(root, "resumed", *on_layouts("t2", "p2", "d2"))
    assert "resumed" in told and "step-000002" in told
    return rows


def test_a_killed_ppo_run_resumes_exactly_on_other_layouts(base, resumed):
    assert_same(resumed, base)


def export(root: Path, checkpoint: str, out: str, *options: str) -> dict[str, torch.Tensor]:
    done = fivefold("export", root / "runs" / checkpoint, root / out, *options)
    assert done.returncode == 0, done.stderr
    return load_file(root / out / "model.safetensors")


def test_policy_and_critic_after_a_resume_are_those_of_one_run(root, base, resumed):
    for part in ("policy", "critic"):
        one = export(root, "base/checkpoints/step-000004", f"one-{part}", "--model", part)
        other = export(root, "resumed/checkpoints/step-000004", f"other-{part}", "--model", part)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.allclose(other[name], tensor, atol=2e-6), name


def test_an_exported_critic_is_a_sequence_classifier(root, base):
    import transformers

    tensors = export(root, "base/checkpoints/step-000002", "critic-hf", "--model", "critic")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(root / "critic-hf")
    assert torch.equal(model.score.weight, tensors["score.weight"]) and model.score.weight.abs().max() > 0
    # It is a model to start from like any other: its head is read, so values are not 0 at first.
    rows, _ = train(root, "from-critic", f"critic.path={root}/critic-hf", "trainer.steps=1", "critic.warmup_steps=0")
    fresh, _ = train(root, "from-fresh", "trainer.steps=1", "critic.warmup_steps=0", "algorithm.updates_per_step=1")
    assert rows[0]["critic/value_mean"] != 0 and fresh[0]["critic/value_mean"] == 0
    done = fivefold("export", root / "runs/base/checkpoints/step-000002", root / "nothing", "--model", "policies")
    assert done.returncode == 2


@pytest.fixture(scope="module")
def llama(root) -> Path:
    """Another family and size with the same tokenizer."""
    sizes = ["--hidden", 48, "--heads", 4, "--layers", 2]
    done = fivefold("init-model", "llama", "--tokenizer", root / "tokenizer", "--out", root / "llama", *sizes)
    assert done.returncode == 0, done.stderr
    return root / "llama"


def test_a_critic_of_another_family_and_size_trains_next_to_the_policy(root, llama):
    rows, _ = train(
        root, "llama", f"critic.path={llama}", "policy.backend=megatron:t2", "trainer.steps=2", "critic.optimizer.warmup_steps=8"
    )  # fmt: skip
    assert rows[-1]["critic/grad_norm"] > 0
    # Its own schedule: two updates a step, of eight that lead up to its rate; the policy's is constant.
    assert [row["critic/lr"] for row in rows] == pytest.approx([2.0e-3 * 2 / 8, 2.0e-3 * 4 / 8])
    assert rows[-1]["policy/lr"] == pytest.approx(1.0e-3)
    done = fivefold("export", root / "runs/llama/checkpoints/step-000002", root / "llama-out", "--model", "critic")
    assert done.returncode == 0, done.stderr
    assert json.loads((root / "llama-out/config.json").read_text())["model_type"] == "llama"


def test_a_run_without_a_critic_cannot_resume_as_one_with(root):
    train(root, "grpo", "algorithm={name: grpo, group_size: 2}", "trainer.steps=1")
    done = fivefold("train", root / "run.yaml", f"trainer.run_dir={root}/runs/grpo", "trainer.steps=2")
    assert done.returncode != 0
    assert "is from a run that learns something else:\n" in done.stderr, done.stderr
    assert '\n  algorithm.name: "grpo" -> "ppo"\n' in done.stderr, done.stderr
    names = done.stderr.partition("trainer.accept_changes=")[2].partition("]")[0] + "]"
    done = fivefold(
        "train", root / "run.yaml", f"trainer.run_dir={root}/runs/grpo", "trainer.steps=2", f"trainer.accept_changes={names}"
    )
    assert done.returncode != 0
    assert "has no critic: it was written by another method" in done.stdout + done.stderr


# --- a reward model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge(root) -> Path:
    return make_judge(root)


@pytest.mark.parametrize(("layout", "judge_layout"), [("d2", "t2"), ("p2", "d2")])
def test_a_reward_model_s_score_is_transformers(root, judge, layout, judge_layout):
    """The score of each sample in samples.jsonl, by transformers' own classifier too. Its pad token ends some of the texts."""
    import transformers

    name, words = f"judge-{layout}", transformers.AutoTokenizer.from_pretrained(judge)
    (pad,) = words.encode("7", add_special_tokens=False)
    config = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    scored, _ = train(
        root, name, "algorithm={name: grpo, group_size: 2}", f"reward.model={{path: {judge}, weight: 0.5}}", "trainer.steps=1",
        f"policy.backend=megatron:{layout}", f"reward.model.backend=megatron:{judge_layout}", "trainer.logged_samples_per_step=8",
        f"engine.sampling.logit_bias={{{pad}: 2.5}}",
    )  # fmt: skip
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge).eval()
    rows = [json.loads(line) for line in (root / "runs" / name / "samples.jsonl").read_text().splitlines()]
    assert len(rows) >= 4
    for row in rows:
        tokens = torch.tensor([words.encode(row["prompt"].rstrip("\n") + "\n" + row["response"])])
        with torch.no_grad():
            score = float(model(tokens).logits[0, 0])
        assert row["reward_parts"]["model"] == pytest.approx(score, abs=2e-6)
        rule = next(value for key, value in row["reward_parts"].items() if key.endswith("digits"))
        assert row["reward"] == pytest.approx(rule + 0.5 * score, abs=2e-6)
    assert scored[0]["reward/model"] != 0
    assert len({row["response"].endswith("7") for row in rows}) == 2


def test_what_is_no_reward_model_is_refused_before_anything_starts(root, judge):
    def check(*overrides: str) -> str:
        done = fivefold("check", root / "run.yaml", *overrides)
        assert done.returncode == 2, done.stdout
        return done.stdout + done.stderr

    assert "a reward model has one label: got 2" in check(f"reward.model.path={root}/model")
    assert "reward.model.path: no directory ./nowhere" in check("reward.model.path=./nowhere")
    assert "critic.path must have the policy's vocabulary" in check(f"critic.path={make_classifier(root / 'wide')}")
    assert "critic.warmup_steps must be below trainer.steps" in check("critic.warmup_steps=4")
    assert "group_size must be at least 2" in check("algorithm={name: rloo, group_size: 1}")
    judged = f"reward.model.path={judge}"
    assert "did you mean" in check(judged, "reward.model.megatron.transformer={recompute_granularty: full}")
    assert "critic.optimizer.betas must be two numbers" in check("critic.optimizer.betas=[0.9]")
    assert "did you mean 'algorithm.surrogate'?" in check("algorithm.surogate=cispo")


# --- given responses -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dpo(root):
    return train(root, "dpo", *dpo_options(root))[0]


def dpo_options(root: Path) -> list[str]:
    path = make_pairs(root)
    return [
        "algorithm={name: dpo, updates_per_step: 2}", f"data.train={path}", f"data.val={path}", "trainer.eval_every=2",
        "trainer.steps=6", "data.prompts_per_step=16", "policy.optimizer.lr=5e-3",
    ]  # fmt: skip


def test_dpo_starts_at_log_2_and_learns_the_pairs(dpo):
    assert dpo[0]["step"] == 0 and dpo[0]["val/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert dpo[0]["val/accuracy"] <= 0.5 and abs(dpo[0]["val/margin"]) < 1e-5
    assert dpo[-1]["val/loss"] < 0.69 and dpo[-1]["val/accuracy"] > 0.9 and dpo[-1]["val/margin"] > 0
    assert {"policy/accuracy", "policy/reward_chosen", "policy/reward_rejected"} <= set(dpo[-1])


def test_dpo_against_a_reference_of_its_own(root, llama):
    """Policy and reference are not one at first, so the loss is not log 2."""
    rows, _ = train(root, "dpo-llama", *dpo_options(root), f"reference.path={llama}", "trainer.steps=1")
    assert abs(rows[0]["val/loss"] - 0.693147) > 1e-4 and abs(rows[0]["val/margin"]) > 1e-3


@pytest.mark.parametrize("layout", ["d2", "c2"])
def test_a_dpo_run_has_the_same_metrics_on_other_layouts(root, dpo, layout):
    rows, _ = train(root, f"dpo-{layout}", *dpo_options(root), f"policy.backend=megatron:{layout}")

    def comparable(rows):
        """At first policy and reference are one: the sign of a margin of 0 is rounding."""
        return [{k: v for k, v in row.items() if row["step"] > 1 or not k.endswith("/accuracy")} for row in rows]

    assert_same(comparable(rows), comparable(dpo))


def test_sft_learns_the_assistant_s_turns_of_conversations(root):
    rows = [
        {"messages": [
            {"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": f"{a + b}"},
            {"role": "user", "content": f"+{a}="}, {"role": "assistant", "content": f"{2 * a + b}"},
        ]}
        for a in range(6) for b in range(6)
    ]  # fmt: skip
    path = root / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    learned, _ = train(
        root, "talks", "algorithm={name: sft}", f"data.train={path}", f"data.val={path}", "trainer.eval_every=4",
        "trainer.steps=12", "data.prompts_per_step=12", "policy.backend=megatron:d2", "policy.optimizer.lr=1e-2", "reward={}",
    )  # fmt: skip
    assert learned[0]["val/loss"] > 2 > learned[-1]["val/loss"]
    # No reward is known for these rows, so nothing is sampled.
    assert not any("accuracy" in name for name in learned[0])
    # Two tokens and an end, twice, at most; the user's turns between them carry no loss.
    assert learned[0]["step"] == 0 and learned[1]["response/length_max"] <= 6


# --- other methods ---------------------------------------------------------------------------------------------------


WHOLE_STEP = {
    # Greedy responses, and a penalty that is summed over responses and told to all replicas before they are compared.
    "remax": "kl: {coef: 0.1, place: reward, estimator: k1}",
    "clip_cov": "cov_fraction: 0.05, cov_low: 0.001",
    "kl_cov": "cov_fraction: 0.05",
    "dapo": "",
}


@pytest.mark.parametrize("name", WHOLE_STEP)
def test_a_run_of_a_method_that_looks_at_the_whole_step_is_the_same_on_two_replicas(root, name):
    """Greedy responses, KL in the reward, tokens chosen among all of the update, refilled groups."""
    algorithm = f"algorithm={{name: {name}, group_size: 4, updates_per_step: 2, {WHOLE_STEP[name]}}}"
    runs = [
        train(root, f"{name}-{layout}", algorithm, "trainer.steps=2", f"policy.backend=megatron:{layout}")[0]
        for layout in ("d1", "d2")
    ]
    assert_same(runs[1], runs[0])
    if name == "dapo":
        assert runs[0][0]["dynamic_sampling/rounds"] >= 1


def test_stale_and_adaptive_numbers_survive_a_resume(root):
    """The adaptive coefficient and the place in the data continue where they were."""
    options = [
        "algorithm={name: dapo, group_size: 2, kl: {coef: 0.1, target: 0.001, horizon: 64}}",
        "policy.optimizer.decay_steps=9",
    ]
    whole, _ = train(root, "adaptive", *options, "trainer.steps=4", "trainer.save_every=2")
    for steps in (2, 4):
        pieces, _ = train(root, "adaptive-pieces", *options, f"trainer.steps={steps}")
    assert len({row["policy/kl_coef"] for row in whole}) > 2
    assert_same(pieces, whole)
