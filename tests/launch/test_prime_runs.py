"""Whole runs of PRIME from the command line: metrics, layouts, adapters, ranks of its own, kill and resume, export, refusals."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.commands import fivefold
from tests.support.documented import undocumented
from tests.support.whole_runs import assert_same, end_run, kill_run, make_judge, make_model, train, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
prm: {optimizer: {lr: 2.0e-3, eps: 1.0e-4}, updates_per_step: 4}
algorithm: {name: prime, group_size: 4, updates_per_step: 2, process_reward: {target: reward}}
data: {prompts_per_step: 8, max_response_tokens: 12}
trainer: {steps: 4}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("prime")
    make_model(root)
    write_run(root, RUN)
    return root


@pytest.fixture(scope="module")
def base(root):
    return train(root, "base", "trainer.save_every=2", "trainer.keep=9")


def test_a_run_tells_what_its_process_reward_model_does(root, base):
    rows, told = base
    names = {"loss", "accuracy", "pair_accuracy", "score_mean", "grad_norm", "lr", "skipped_updates"}
    assert all({f"prm/{name}" for name in names} <= set(row) for row in rows)
    assert undocumented(name for row in rows for name in row) == []
    assert f"prm      {root}/model against {root}/model, learning rate 0.002, 4 updates before its rewards" in told
    # It begins as what it is compared with: scores are 0, and no one knows.
    assert 0.6 < rows[0]["prm/loss"] < 0.75 and rows[-1]["prm/score_mean"] != 0
    assert (root / "runs/base/checkpoints/step-000002/prm").is_dir()


@pytest.mark.parametrize(
    "given",
    [
        ("policy.backend=megatron:d2", "prm.backend=megatron:t2"),
        ("policy.backend=megatron:p2", "prm.backend=megatron:c2"),
        ("launch.allocation=megatron[policy]:d1+megatron[prm]:d1",),
        pytest.param(
            ("policy.backend=megatron:t2", "launch.allocation=megatron[policy]:t2+megatron[prm]:d2"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda given: "-".join(key.rpartition("=")[2] for key in given),
)
def test_a_run_has_the_same_metrics_on_other_layouts(root, base, given):
    name = "-".join(key.rpartition("=")[2].replace(":", "") for key in given)
    assert_same(train(root, name, *given)[0], base[0])


def test_a_run_that_was_killed_continues_on_another_layout_as_if_nothing_had_been(root, base):
    moved = ["policy.backend=megatron:d2", "prm.backend=megatron:p2"]
    kill_run(root, "killed", 2, "trainer.save_every=2", *moved)
    rows, told = train(root, "killed", "policy.backend=megatron:t2", "prm.backend=megatron:d2")
    assert "resumed after step 2" in told
    assert_same(rows, base[0])


def slow_prm():
    """The process reward model takes its time after its second update of the second step."""
    from fivefold.megatron.model import MegatronModel

    train_step = MegatronModel.train_step

    def following(self, *arguments):
        # The rates tell them apart.
        if self._updater.optimizer.param_groups[0]["max_lr"] == 2e-3 and self.version == 6:
            (Path(os.environ["FIVEFOLD_TEST_ROOT"]) / "slow").touch()
            time.sleep(3)
        return train_step(self, *arguments)

    MegatronModel.train_step = following


def test_sigterm_between_updates_of_the_process_reward_model_loses_none_of_them(root, base, tmp_path, monkeypatch):
    monkeypatch.setenv("FIVEFOLD_TEST_ROOT", str(tmp_path))
    told = end_run(root, "asked", tmp_path / "slow", slow_prm)
    assert "in step 2, which continues after" in told, told
    rows, told = train(root, "asked", "policy.backend=megatron:d2")
    assert "continues after" in told
    assert_same(rows, base[0])


def test_with_adapters_it_is_compared_with_itself_without_them(root):
    """The same as with a copy of the weights that it began with."""
    adapters = ["prm.lora.rank=4", "prm.lora.alpha=8", "trainer.steps=2"]
    one, _ = train(root, "adapters", *adapters)
    copied = root / "copy"
    if not copied.exists():
        copied.symlink_to(root / "model")
    other, _ = train(root, "adapters-copy", *adapters, f"prm.reference_path={copied}")
    assert_same(one, other)
    assert any(row["prm/score_mean"] != 0 for row in one)


@pytest.mark.parametrize("given", ["reference: policy", "granularity: response", "update: after, loss: dpo"])
def test_other_choices_have_the_metrics_of_one_process_on_another_layout(root, given):
    choice = f"algorithm.process_reward={{target: reward, {given}}}"
    one, _ = train(root, f"one-{given[:6]}", choice, "trainer.steps=2")
    two, _ = train(
        root, f"two-{given[:6]}", choice, "trainer.steps=2", "policy.backend=megatron:d2", "prm.backend=megatron:t2"
    )
    if given == "reference: policy":
        # Before the first update model and policy are one, and which of them says more is rounding.
        for row in (one[0], two[0]):
            del row["prm/accuracy"], row["prm/score_mean"]
    assert_same(two, one)


def test_sampling_ahead_has_process_rewards_too(root):
    rows, _ = train(root, "ahead", "rollout.max_staleness=1", "trainer.steps=2")
    assert all(row["prm/loss"] > 0 for row in rows)


def test_the_model_is_exported_as_a_language_model(root, base, tmp_path):
    import torch
    import transformers

    checkpoint = root / "runs/base/checkpoints/step-000004"
    done = fivefold("export", checkpoint, tmp_path / "prm", "--model", "prm")
    assert done.returncode == 0, done.stdout + done.stderr
    load = transformers.AutoModelForCausalLM.from_pretrained
    learned, began = load(tmp_path / "prm").state_dict(), load(root / "model").state_dict()
    assert learned.keys() == began.keys()
    assert max(float((learned[name] - began[name]).abs().max()) for name in began) > 1e-3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in learned.values())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["algorithm.name=grpo", "algorithm.process_reward.coef=1"], "algorithm.process_reward.coef must be 0: credit: response"),
        (["prm.updates_per_step=3"], "data.prompts_per_step must be a multiple of prm.updates_per_step"),
        (["algorithm.process_reward={target: reward, loss: dpo}"], "write update: after"),
        (["prm.backend=megatron:d3"], "prm.backend shares the policy's ranks"),
        (["prm.tokens_per_micro_batch=8"], "prm.tokens_per_micro_batch must hold the longest sequence"),
        (["reward.functions={}", "reward.model.path={root}/judge", "algorithm.process_reward.target=correct"],
         "correct needs a reward function that decides"),
        (["prm.path={root}/judge"], "must have the policy's vocabulary"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(root, tmp_path, given, told):
    from tests.support.tiny_models import make_model as make_tiny

    judge = root / "judge"
    if not judge.exists():
        make_judge(root) if "reward" in given[0] else make_tiny("qwen3", judge)
    done = fivefold("check", root / "run.yaml", *(key.format(root=root) if "{root}" in key else key for key in given))
    assert done.returncode != 0 and told in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_section_without_a_model_is_reported(root):
    done = fivefold("check", root / "run.yaml", "algorithm={name: grpo, group_size: 4}")
    assert "prm has no effect: grpo has no process reward model: set algorithm.process_reward.coef" in done.stdout, (
        done.stdout
    )
