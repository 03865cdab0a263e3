"""Whole runs whose models have ranks of their own: reference, critic and reward model next to the policy's ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.support.commands import Command
from tests.support.whole_runs import assert_same, end_run, kill_run, make_judge, make_model, make_pairs, train, write_run

RUN = """
policy: {tokens_per_micro_batch: 64}
critic: {optimizer: {lr: 2.0e-3, eps: 1.0e-4}, warmup_steps: 1}
algorithm: {name: ppo, group_size: 2, updates_per_step: 2, lam: 0.95, kl: {coef: 0.05, place: reward, estimator: k1}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 8, max_response_tokens: 12}
reward: {model: {path: $ROOT/judge, weight: 0.5}}
eval: {max_prompts: 4}
trainer: {steps: 3, eval_every: 2}
"""
EACH = "megatron[policy]:d1+megatron[ref]:d1+megatron[critic]:d1+megatron[reward]:d1"
SOME = "megatron[policy]:d2+megatron[ref]:t2|megatron[critic]:d2|megatron[reward]:p2"
TWO = "megatron[policy]:d1+megatron[ref]:d1|megatron[critic]:d1|megatron[reward]:d1"
ONE = "megatron[policy]:t2|megatron[ref]:d2|megatron[reward]:d2+megatron[critic]:d1"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("roles")
    make_model(root)
    make_judge(root)
    write_run(root, RUN)
    return root


@pytest.fixture(scope="module")
def base(root):
    """All models on one rank."""
    return train(root, "base")[0]


def on(allocation: str) -> str:
    return f"launch.allocation={allocation}"


@pytest.mark.parametrize("allocation", [EACH, pytest.param(SOME, marks=pytest.mark.slow)])
def test_a_ppo_run_has_the_same_metrics_with_models_on_ranks_of_their_own(root, base, allocation):
    rows, told = train(root, f"apart-{allocation == EACH}", on(allocation))
    assert_same(rows, base)
    assert "         rank  policy  reference  critic  reward model\n" in told
    if allocation == EACH:
        assert "         2     -       -          whole   -\n" in told


def test_a_reference_without_adapters_is_on_the_policy_s_ranks_without_the_critic_s(root):
    """The reference is the policy with its adapters switched off: asked by every rank, held by the policy's."""
    adapters = ("policy.lora.rank=4", "policy.lora.alpha=8")
    one, _ = train(root, "adapters", *adapters)
    apart, told = train(root, "adapters-apart", *adapters, on("megatron[policy]:t2|megatron[reward]:t2+megatron[critic]:d1"))
    assert "the reference is the model without them" in told
    assert_same(apart, one)
    # From where the policy began, not from where it was before this step's updates.
    last = apart[-1]
    assert last["policy/kl_reference"] > 5 * last["policy/kl_old"] > 0


def test_a_run_that_was_killed_continues_with_its_models_on_other_ranks(root, base):
    kill_run(root, "moved", 2, "trainer.save_every=1", on(ONE))
    rows, told = train(root, "moved", on(TWO))
    assert "resumed after step" in told
    assert_same(rows, base)


def models_wait_for_each_other():
    """Reference and critic do not compute before the other one has begun to, nor do policy and critic learn."""
    from fivefold.megatron.model import MegatronModel

    forward, train_step = MegatronModel.forward, MegatronModel.train_step

    def meet(kind: str, role: str, other: str, number: int) -> None:
        marks = Path(os.environ["FIVEFOLD_TEST_ROOT"])
        (marks / f"{role}-{kind}-{number}").touch()
        while not (marks / f"{other}-{kind}-{number}").exists():
            time.sleep(0.01)

    def following(self, batch):
        role = os.environ["FIVEFOLD_TEST_ROLES"].split()[self._mesh.ranks.rank]
        if role != "policy":
            self._passes = self.__dict__.get("_passes", 0) + 1
            meet("computes", role, {"reference": "critic", "critic": "reference"}[role], self._passes)
        return forward(self, batch)

    def learning(self, *arguments):
        role = os.environ["FIVEFOLD_TEST_ROLES"].split()[self._mesh.ranks.rank]
        # The critic learns alone in the first step.
        if (number := self.version - 2 * (role == "critic")) >= 0:
            meet("learns", role, {"policy": "critic", "critic": "policy"}[role], number)
        return train_step(self, *arguments)

    MegatronModel.forward, MegatronModel.train_step = following, learning


def test_models_on_ranks_of_their_own_compute_and_learn_at_the_same_time(root, base, tmp_path, monkeypatch):
    """One after the other, they would wait permanently."""
    monkeypatch.setenv("FIVEFOLD_TEST_ROOT", str(tmp_path))
    monkeypatch.setenv("FIVEFOLD_TEST_ROLES", "policy reference critic")
    given = [on("megatron[policy]:d1|megatron[reward]:d1+megatron[ref]:d1+megatron[critic]:d1"), "trainer.steps=2"]
    process = Command(
        "train", root / "run.yaml", f"trainer.run_dir={root}/runs/meanwhile", *given, hook=models_wait_for_each_other
    )
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "critic-computes-2").exists() and (tmp_path / "policy-learns-1").exists()


def slow_reference():
    """The reference alone takes its time in the second step."""
    from fivefold.megatron.model import MegatronModel

    forward = MegatronModel.forward

    def following(self, batch):
        self._passes = self.__dict__.get("_passes", 0) + 1
        if self._mesh.ranks.rank == 1 and self._passes == 2:
            (Path(os.environ["FIVEFOLD_TEST_ROOT"]) / "slow").touch()
            time.sleep(3)
        return forward(self, batch)

    MegatronModel.forward = following


def slow_critic():
    """The critic alone takes its time after its first update of the second step."""
    from fivefold.megatron.model import MegatronModel

    train_step = MegatronModel.train_step

    def following(self, *arguments):
        if self.spec.value_head and self.version == 3:
            (Path(os.environ["FIVEFOLD_TEST_ROOT"]) / "slow").touch()
            time.sleep(3)
        return train_step(self, *arguments)

    MegatronModel.train_step = following


def test_a_run_resumes_exactly_after_sigterm_to_a_rank_of_another_model(root, base, tmp_path, monkeypatch):
    monkeypatch.setenv("FIVEFOLD_TEST_ROOT", str(tmp_path))
    told = end_run(root, "asked", tmp_path / "slow", slow_reference, on(EACH), rank=1)
    assert "asked to end in step 2, which is repeated on resume\n" in told
    rows, told = train(root, "asked", on(TWO))
    assert "resumed after step 1 " in told
    assert_same(rows, base)


@pytest.mark.slow
def test_updates_of_a_critic_on_its_own_ranks_are_counted_when_a_run_ends(root, tmp_path, monkeypatch):
    """By what their optimizers have counted: the first rank has not heard of all of them."""
    monkeypatch.setenv("FIVEFOLD_TEST_ROOT", str(tmp_path))
    told = end_run(root, "learning", tmp_path / "slow", slow_critic, on(EACH), rank=2)
    saved = root / "runs/learning/checkpoints/step-000001"
    counted = sum(json.loads((saved / part / "optimizer.json").read_text())["step"] for part in ("policy", "critic"))
    # Two were the critic's in the first step.
    assert f"in step 2, which is repeated on resume; {counted - 2:.0f} of its optimizer steps were taken and stay" in told, (
        told
    )


def failing_reference():
    from fivefold.megatron.model import MegatronModel

    forward = MegatronModel.forward

    def following(self, batch):
        if self._mesh.ranks.rank == 1:
            raise RuntimeError("this reference is out of order")
        return forward(self, batch)

    MegatronModel.forward = following


def test_an_error_of_a_rank_without_the_policy_ends_the_run_with_its_traceback(root):
    process = Command("train", root / "run.yaml", f"trainer.run_dir={root}/runs/fails", on(EACH), hook=failing_reference)
    done = process.finish()
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "this reference is out of order" in done.stderr and "Traceback" in done.stderr
    assert "rank 0 on" not in done.stderr


KINDS = {
    "ahead": ["rollout.max_staleness=1"],
    "clip-cov": [
        "algorithm={name: clip_cov, group_size: 4, updates_per_step: 2, kl: {coef: 0.01}}", "reward.model.path=null"
    ],
    "dapo": ["algorithm={name: dapo, group_size: 4, kl: {coef: 0.01}}", "reward.model.path=null"],
}  # fmt: skip
WHEN = ("async/complete_groups", "async/trainer_wait_seconds")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_methods_have_the_metrics_of_one_rank_too(root, kind):
    """Samples that wait for later steps; tokens that are chosen among all of a step; rounds of sampling."""
    rest = "+megatron[critic]:d1|megatron[reward]:d1" if kind == "ahead" else ""
    one = train(root, kind, *KINDS[kind])[0]
    apart = train(root, f"{kind}-apart", *KINDS[kind], on(f"megatron[policy]:d2+megatron[ref]:d1{rest}"))[0]
    one, apart = ([{k: v for k, v in row.items() if k not in WHEN} for row in rows] for rows in (one, apart))
    assert_same(apart, one)


@pytest.mark.slow
def test_a_dpo_run_has_the_same_metrics_with_its_reference_on_ranks_of_its_own(root):
    path = make_pairs(root)
    given = [
        "algorithm={name: dpo, updates_per_step: 2}", f"data.train={path}", f"data.val={path}", "reward.model.path=null",
        "data.prompts_per_step=16",
    ]  # fmt: skip
    one = train(root, "dpo", *given)[0]
    apart = train(root, "dpo-apart", *given, on("megatron[policy]:d2+megatron[ref]:t2"))[0]
    # Before the first update policy and reference are one, and which of them says more is rounding.
    for row in [*one[:2], *apart[:2]]:
        for name in [name for name in row if "accuracy" in name]:
            del row[name]
    assert_same(apart, one)
