"""Whole runs whose groups are sampled ahead, by an engine in the ranks: what is sampled when is the same in every run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint.manifest import MANIFEST, Manifest, entry_of
from fivefold.rollout.asynchronous import AsyncRollouts
from fivefold.rollout.group_files import read_groups, write_groups
from tests.support.commands import Command, fivefold, wait_for
from tests.support.whole_runs import assert_same, kill_run, make_model, metrics, train, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 512}
algorithm: {name: grpo, group_size: 4, updates_per_step: 2, kl: {coef: 0.01}}
data: {val: [$ROOT/data/test.parquet], prompts_per_step: 4, max_response_tokens: 8}
eval: {samples: 2, max_prompts: 4}
trainer: {steps: 6, eval_every: 2, save_every: 1, keep: 9, logged_samples_per_step: 4}
"""
WHEN = ("async/complete_groups", "async/trainer_wait_seconds")
"""Metrics that say when something was there, not what."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ahead")
    make_model(root, rows=40)
    write_run(root, RUN)
    return root


@pytest.fixture(scope="module")
def ahead(root):
    rows, told = train(root, "ahead", "rollout.max_staleness=2")
    assert "ahead    samples are at most 2 steps old; a step waits for its groups\n" in told
    assert "samples of older weights are not corrected" in told
    compared, first = told.index("engine's log-probs agree with the trainer's"), told.index("step 1 |")
    assert compared < first and told.count("log-probs agree") == 1, "a comparison comes before the first step, and once"
    return rows


@pytest.fixture(scope="module")
def base(root):
    return train(root, "base")[0]


def without(rows, *starts: str):
    return [{name: value for name, value in row.items() if not name.startswith(starts)} for row in rows]


def test_nothing_ahead_is_the_synchronous_run(root, base):
    rows, _ = train(root, "none", "rollout.max_staleness=0")
    assert {row["async/staleness_max"] for row in rows[1:]} == {0.0}
    assert_same(without(rows, "async/"), base)


def test_what_is_sampled_ahead_is_as_old_as_it_may_be_and_no_older(ahead):
    assert [row["async/staleness_max"] for row in ahead[1:]] == [0, 1, 2, 2, 2, 2]
    # Two optimizer steps a step.
    assert [row["rollout/staleness_mean"] for row in ahead[1:]] == [0, 2, 4, 4, 4, 4]
    assert [row["async/unused_groups"] for row in ahead[1:]] == [8, 8, 8, 8, 4, 0], "nothing is sampled for after the end"


def test_half_a_step_ahead_has_samples_of_two_ages(root):
    """Of four groups a step two are given out ahead: half of a step's samples are of the weights before."""
    rows = train(root, "half", "rollout.max_staleness=0.5", "trainer.steps=4", "trainer.eval_every=0")[0][1:]
    assert [row["async/staleness_mean"] for row in rows] == [0, 0.5, 0.5, 0.5]
    assert [row["async/unused_groups"] for row in rows] == [2, 2, 2, 0]


@pytest.mark.parametrize("layout", ["d1", "d2"])
def test_a_run_killed_while_groups_wait_continues_with_them(root, ahead, layout):
    """Groups that were complete are those of older weights: sampled again they would be others."""
    kill_run(root, f"killed-{layout}", 3, "rollout.max_staleness=2")
    rows, _ = train(root, f"killed-{layout}", "rollout.max_staleness=2", f"policy.backend=megatron:{layout}")
    assert_same(without(rows, *WHEN), without(ahead, *WHEN))
    assert (root / f"runs/killed-{layout}/checkpoints/step-000003/rollouts/groups-00000.safetensors").is_file()


def waits_for_groups_in_step_5():
    """Which no engine completes."""
    choice = AsyncRollouts._choice

    def never(self, step, left_out):
        chosen = choice(self, step, left_out)
        if step < 4:
            return chosen
        Path(os.environ["FIVEFOLD_TEST_MARK"]).touch()
        return None

    AsyncRollouts._choice = never


def sends_weights_for_ever_after_step_4():
    """Whose update is taken: done again on the same groups it would be taken twice."""
    begin = AsyncRollouts._begin

    def never(self, step):
        if step == 4:
            Path(os.environ["FIVEFOLD_TEST_MARK"]).touch()
            while True:
                self._ranks.barrier()
                time.sleep(0.01)
        begin(self, step)

    AsyncRollouts._begin = never


@pytest.mark.parametrize("hook", [waits_for_groups_in_step_5, sends_weights_for_ever_after_step_4])
def test_a_run_asked_to_end_while_groups_wait_continues_with_them(root, ahead, tmp_path, monkeypatch, hook):
    monkeypatch.setenv("FIVEFOLD_TEST_MARK", str(tmp_path / "mark"))
    name, given = hook.__name__, ["rollout.max_staleness=2", "policy.backend=megatron:d2"]
    process = Command(
        "train", root / "run.yaml", f"trainer.run_dir={root}/runs/{name}", *given, "trainer.save_every=0", hook=hook
    )
    wait_for((tmp_path / "mark").exists, process)
    process.send_signal(signal.SIGTERM)
    done = process.finish()
    assert done.returncode == 128 + signal.SIGTERM and "asked to end by SIGTERM" in done.stdout, done.stdout + done.stderr
    assert [path.name for path in (root / f"runs/{name}/checkpoints").glob("step-*")] == ["step-000004"]
    assert_same(without(train(root, name, *given)[0], *WHEN), without(ahead, *WHEN))


def resumed(root: Path, name: str, origin: str, max_staleness: str):
    """From step 3 of another run."""
    given = [f"trainer.run_dir={root}/runs/{name}", f"trainer.resume={root}/runs/{origin}/checkpoints/step-000003"]
    given += [f"rollout.max_staleness={max_staleness}", "trainer.accept_changes=[rollout.max_staleness]"]
    return fivefold("train", root / "run.yaml", *given)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_waits_too_long_for_a_lowered_bound_is_sampled_again(root, ahead, max_staleness):
    done = resumed(root, f"lowered-{max_staleness}", "ahead", str(max_staleness))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(root, f"lowered-{max_staleness}")
    assert [row["step"] for row in rows] == [4, 5, 6]
    assert all(row["async/staleness_max"] <= max_staleness for row in rows)
    state = json.loads((root / f"runs/lowered-{max_staleness}/checkpoints/step-000006/state.json").read_text())
    assert (state["rollouts"]["position"], state["rollouts"]["unused"]) == (24, []), "each prompt was used once"


def test_a_synchronous_run_continues_ahead(root, base):
    done = resumed(root, "later", "base", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(root, "later")
    assert [row["async/staleness_max"] for row in rows] == [0, 1, 2]
    assert_same(without(rows[:1], "async/"), base[4:5])


def test_a_run_ahead_does_not_resume_as_a_synchronous_one_that_would_lose_prompts(root, ahead):
    done = resumed(root, "sooner", "ahead", "null")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    says = "12 prompts were given out and not used, and a synchronous run would leave them out: set rollout.max_staleness: 0"
    assert done.stderr.count(says) == 1, done.stderr


@pytest.mark.parametrize("ahead_by", ["1", "null"])
def test_groups_are_compared_by_the_reward_that_the_method_makes(root, ahead_by):
    """No response is right: what differs is the penalty of their lengths, also where a step samples for itself."""
    (root / "never.py").write_text("def never(response):\n    return 0.0\n")
    given = [f"rollout.max_staleness={ahead_by}", f"reward.functions={{'{root}/never.py:never': 1.0}}", "trainer.steps=1",
             "algorithm={name: dapo, group_size: 4, overlong_buffer: 0.9, dynamic_sampling_by: shaped_reward}"]  # fmt: skip
    (row,) = [row for row in train(root, f"shaped-{ahead_by}", *given)[0] if "dynamic_sampling/prompts" in row]
    assert row["reward/frac_reward_zero_std"] == 1 and row["dynamic_sampling/zero_variance_used"] == 0


def test_groups_without_reward_variance_make_room_for_others(root):
    """Rewards that only long responses with few digits tell apart: most groups are left out."""
    (root / "seldom.py").write_text("def seldom(response):\n    return float(response.count('7') > 1)\n")
    given = ["algorithm.name=dapo", "rollout.max_staleness=1", f"reward.functions={{'{root}/seldom.py:seldom': 1.0}}",
             "trainer.steps=3", "algorithm.kl.coef=0", "algorithm.overlong_buffer=0"]  # fmt: skip
    rows = train(root, "dynamic", *given)[0][1:]
    assert all(row["async/staleness_max"] <= 1 for row in rows)
    assert all(row["dynamic_sampling/prompts"] > 4 for row in rows)
    assert all(row["dynamic_sampling/kept_fraction"] == 4 / row["dynamic_sampling/prompts"] for row in rows)
    assert all(row["dynamic_sampling/zero_variance_used"] == 0 for row in rows)
    assert all(row["filtered/reward/frac_reward_zero_std"] == 0 < row["reward/frac_reward_zero_std"] for row in rows)


def test_groups_without_reward_variance_fill_up_what_is_missing(root):
    (root / "never.py").write_text("def never(response):\n    return 0.0\n")
    given = ["algorithm.name=dapo", "rollout.max_staleness=1", f"reward.functions={{'{root}/never.py:never': 1.0}}",
             "trainer.steps=2", "algorithm.kl.coef=0", "algorithm.overlong_buffer=0", "algorithm.sampling_rounds=2"]  # fmt: skip
    for row in train(root, "filled", *given)[0][1:]:
        numbers = [row[f"dynamic_sampling/{name}"] for name in ("prompts", "kept_fraction", "zero_variance_used")]
        assert numbers == [8, 0, 4]


def step_3(root: Path, to: Path, change: Callable[..., None]) -> Path:
    """The checkpoint of a run ahead, copied with other groups that wait: `change` is given their file and what it holds."""
    shutil.copytree(root / "runs/ahead/checkpoints/step-000003", to)
    (path,) = (to / "rollouts").glob("*.safetensors")
    change(path, *read_groups(path))
    entries = {**Manifest.read(to).files, str(path.relative_to(to)): entry_of(path)}
    (to / MANIFEST).write_text(Manifest(entries).text)
    return to


def leave_all_out(path: Path, *held: Any) -> None:
    write_groups(path, {}, ())


@pytest.mark.parametrize("change", ["data.system_prompt=12", "reward.functions={'$ROOT/ones.py:ones': 1.0}"])
def test_groups_that_wait_are_sampled_again_where_prompts_or_rewards_change(root, ahead, tmp_path, change):
    """The steps after the resume are those of a checkpoint in which no group waits."""
    (root / "ones.py").write_text("def ones(response):\n    return float(response.count('1'))\n")
    key, runs = change.partition("=")[0], []
    for name, write in (("waiting", write_groups), ("none", leave_all_out)):
        origin = step_3(root, tmp_path / name, write)
        given = ["rollout.max_staleness=2", f"trainer.resume={origin}", f"trainer.accept_changes=[{key}]"]
        runs.append(train(root, f"{key}-{name}", *given, change.replace("$ROOT", str(root))))
    (rows, told), (expected, _) = runs
    assert f"changed: {key}; the prompts whose groups wait in the checkpoint are sampled again" in told
    assert_same(without(rows, *WHEN), without(expected, *WHEN))


def swap(path: Path, groups: Any, scored: Any, parts: Any, counts: Any, prompts: Any) -> None:
    """Two places of step 4 have each other's groups, as they would after a change that no key says."""
    for held in (groups, prompts):
        held[12], held[13] = held[13], held[12]
    write_groups(path, groups, scored, parts, counts, prompts)


def test_a_group_is_sampled_again_where_its_place_has_another_prompt(root, ahead, tmp_path):
    rows, _ = train(root, "swapped", "rollout.max_staleness=2", f"trainer.resume={step_3(root, tmp_path / 'swapped', swap)}")
    assert [rows[0][f"async/staleness_{age}"] for age in (0, 2)] == [0.5, 0.5], (
        "two of four groups are of the latest weights"
    )
