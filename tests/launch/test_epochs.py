"""Evaluation and checkpoints by epoch: `trainer.eval_every: epoch`, `trainer.save_every: epoch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config import ConfigError, RunConfig
from tests.support.commands import fivefold
from tests.support.whole_runs import assert_same, kill_run, make_model, metrics, train, write_run

RUN = """
algorithm: {name: grpo, group_size: 2, kl: {coef: 0}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 16, max_response_tokens: 4}
eval: {max_prompts: 2}
trainer: {epochs: 2, eval_every: epoch, save_every: epoch, eval_before_train: false, keep: 9}
"""
"""40 rows: two steps of 16 prompts an epoch."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("epochs")
    make_model(root, rows=40)
    write_run(root, RUN)
    return root


def evaluated(rows: list[dict[str, float]]) -> list[float]:
    return [row["step"] for row in rows if any(key.startswith("val/") for key in row)]


def saved(root: Path, name: str) -> list[str]:
    return sorted(path.name for path in (root / "runs" / name / "checkpoints").iterdir() if path.name.startswith("step-"))


def test_a_run_evaluates_and_saves_after_each_epoch_even_if_it_was_killed(root):
    whole, output = train(root, "whole")
    assert [row["step"] for row in whole] == [1, 2, 3, 4] and evaluated(whole) == [2, 4]
    assert saved(root, "whole") == ["step-000002", "step-000004"]
    assert "saves    every epoch, " in output
    kill_run(root, "killed", 2)
    again, _ = train(root, "killed")
    assert evaluated(again) == [2, 4] and saved(root, "killed") == ["step-000002", "step-000004"]
    assert_same(again, whole)


def test_a_run_that_never_evaluates_does_not_at_its_end_either(root):
    rows, _ = train(root, "never", "trainer.eval_every=never", "trainer.steps=2", "trainer.eval_before_train=true")
    assert evaluated(rows) == [0]
    rows_of_run, output = train(
        root, "not-at-all", "trainer.eval_every=never", "trainer.steps=1", "trainer.ends_with_data=true"
    )
    assert (
        evaluated(rows_of_run) == []
        and "data.val has no effect: the run evaluates neither before nor after a step" in output
    )
    with pytest.raises(ConfigError, match=r"trainer.stop_at looks at evaluations: set trainer.eval_every and data.val"):
        RunConfig.of(
            model={"path": "m"}, data={"train": ["a.jsonl"], "val": ["b.jsonl"]},
            trainer={"eval_every": "never", "stop_at": {"val/a/accuracy": 0.5}},
        )  # fmt: skip


def test_a_run_that_counts_steps_is_resumed_by_one_that_counts_epochs(root):
    train(root, "moved", "trainer.eval_every=3", "trainer.save_every=0", "trainer.steps=3")
    train(root, "moved", "trainer.steps=4")
    assert evaluated(metrics(root, "moved")) == [3, 4] and saved(root, "moved") == ["step-000003", "step-000004"]


def test_a_schedule_over_the_data_falls_as_it_does_in_a_run_that_takes_them_all(root):
    falls = ("policy.optimizer={lr: 1.0e-3, eps: 1.0e-4, schedule: linear, schedule_over: data, warmup_steps: 0.5}",)
    whole, _ = train(root, "all", *falls)
    short, _ = train(root, "short", *falls, "trainer.steps=3")
    assert [row["policy/lr"] for row in short] == [row["policy/lr"] for row in whole][:3]
    over_run, _ = train(root, "over-run", *falls, "policy.optimizer.schedule_over=run", "trainer.steps=3")
    assert [row["policy/lr"] for row in over_run] != [row["policy/lr"] for row in short]
    longer = fivefold("train", root / "run.yaml", f"trainer.run_dir={root}/runs/short", *falls, "trainer.epochs=3")
    assert longer.returncode and "trainer.epochs: 2 -> 3" in longer.stdout + longer.stderr


@pytest.mark.parametrize("value", ["epochs", 0.5, True])
def test_another_word_than_epoch_is_refused_with_what_may_stand_there(value):
    with pytest.raises(ConfigError, match=r"trainer\.save_every .*epoch"):
        RunConfig.of({"model": {"path": "m"}, "trainer": {"save_every": value}})


def test_evaluation_by_epoch_needs_validation_files(root):
    done = fivefold("check", root / "run.yaml", "data.val=[]")
    assert done.returncode and "trainer.eval_every needs validation files" in done.stdout + done.stderr
