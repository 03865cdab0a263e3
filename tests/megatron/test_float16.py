"""Training in float16: the step of float32 up to rounding, whatever the loss is multiplied by, and how that moves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.config.learners import MegatronConfig, PolicyConfig
from fivefold.trainer.checks import SkipGuard
from fivefold.trainer.update_metrics import update_metrics
from fivefold.types import StepReport
from tests.support.cluster import Together
from tests.support.shards import shard_of_replica
from tests.support.two_steps import (
    LENGTHS,
    OBJECTIVE,
    POLICY,
    ROUTER,
    difference,
    expected,
    megatron_step,
    whole_batch,
)

ROUNDING = (5e-3, 2e-2, 3e-3)
"""Relative loss, relative gradient norm, absolute parameter: 11 bits where float32 has 24. In the second step a token may lie
on the other side of a clip bound; parameters below 4 are rounded to 1/512."""


def float16(model: str = "qwen3", **scale: float) -> PolicyConfig:
    megatron = MegatronConfig(optimizer=scale, transformer=ROUTER if "moe" in model else {})
    return replace(POLICY, dtype="float16", megatron=megatron)


CASES = [
    ("qwen3", "d1", 2.0**16),
    ("qwen3", "d1", 2.0**4),
    ("qwen3", "d2t2", 2.0**12),
    ("qwen3", "p2c2", 2.0**12),
    ("qwen2_tied", "p2", 2.0**12),
    ("qwen3_moe", "d2e2", 2.0**12),
]


@pytest.fixture(scope="module")
def steps(cluster, models):
    def call(name: str, layout: str, scale: float):
        policy = float16(name, initial_loss_scale=scale)
        return f"megatron:{layout}", megatron_step, models(name), policy, expected(models(name), policy)[2]

    return Together(cluster, {case: call(*case) for case in CASES})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_in_float16_is_that_of_float32_up_to_rounding(steps, models, case):
    oracle = expected(models(case[0]), float16(case[0]))
    differences = difference(steps[case], oracle)
    assert all(size <= bound for size, bound in zip(differences, ROUNDING, strict=True)), differences
    for (first, _), _ in steps[case]:
        assert (first.loss, first.grad_norm) == pytest.approx(oracle[0][0], rel=2e-3)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_what_the_loss_is_multiplied_by_changes_no_number_but_by_what_vanishes(steps, case):
    (reports, weights), *_ = steps[case]
    (others, other_weights), *_ = steps[CASES[1]]
    assert [(one.loss_scale, other.loss_scale) for one, other in zip(reports, others, strict=True)] == [
        (2.0**16, 2.0**4)
    ] * 2
    assert reports[0].loss == others[0].loss and reports[0].grad_norm == pytest.approx(others[0].grad_norm, rel=1e-3)
    same = [float((weights[name] == other_weights[name]).float().mean()) for name in weights]
    assert sum(same) / len(same) > 0.95


def overflowing(mesh, directory: Path, updates: int, scale: dict[str, float], saved: Path | None = None):
    """[(skipped, overflowed, scale, whether parameters are as at first, version)] of updates; from `saved` where it is there,
    and written there otherwise."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, float16(**scale), mesh, total_updates=40)
    if saved is not None and saved.exists():
        model.load(saved)
    batch = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    first, records = {name: tensor.clone() for name, tensor in model.weights()}, []
    for _ in range(updates):
        report = model.train_step(batch, OBJECTIVE.loss)
        same = all(torch.equal(tensor, first[name]) for name, tensor in model.weights())
        records.append((report.skipped, report.overflowed, report.loss_scale, same, model.version))
    if saved is not None and not saved.exists():
        mesh.ranks.barrier()
        saved.mkdir(exist_ok=True)
        model.save(saved)
    return records


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "d2t2"), ("qwen3_moe", "d2e2")])
def test_the_scale_falls_at_overflows_and_doubles_after_enough_good_updates(cluster, models, name, layout):
    """By hand: the first overflow is forgiven (hysteresis 2), each further one halves; three good updates double it."""
    scale = {"initial_loss_scale": 2.0**24, "loss_scale_window": 3}
    updates, *others = cluster.run(overflowing, f"megatron:{layout}", models(name), 24, scale)
    assert all(other == updates for other in others)
    now, patience, good, version = 2.0**24, 2, 0, 0
    for skipped, overflowed, used, same, counted in updates:
        version += not skipped
        assert (used, overflowed, counted, same) == (now, skipped, version, version == 0)
        good, patience = (0, patience - 1) if skipped else (good + 1, patience)
        if skipped and patience <= 0:
            now /= 2
        elif good == 3:
            now, good, patience = now * 2, 0, 2
    assert updates[0][0] and version >= 6 and now < 2.0**24


def test_a_run_that_continues_elsewhere_has_the_scale_that_was_saved(cluster, models, tmp_path):
    """Seventeen updates and seven on another layout are the twenty-four of one run."""
    scale = {"initial_loss_scale": 2.0**24, "loss_scale_window": 3}
    whole = cluster.run(overflowing, "megatron:d2", models("qwen3"), 24, scale)[0]
    begun = cluster.run(overflowing, "megatron:d2", models("qwen3"), 17, scale, tmp_path / "saved")[0]
    rest = cluster.run(overflowing, "megatron:t2", models("qwen3"), 7, scale, tmp_path / "saved")[0]

    def without_sameness(rows):
        return [(*row[:3], row[4]) for row in rows]

    assert without_sameness(begun + rest) == without_sameness(whole)


def test_updates_that_only_lower_the_scale_end_no_run(tmp_path):
    messages: list[str] = []
    guard = SkipGuard(ranks=None, max_skipped=0, run_dir=tmp_path, log=messages.append)
    report = StepReport(0.5, math.inf, 0.0, {}, 1, 8, 2, skipped=True, loss_scale=2.0**20, overflowed=True)
    for _ in range(30):
        guard.check(report, None, "policy", 0)
    assert "overflow float16 at a loss scale of 1.04858e+06" in messages[0]
    with pytest.raises(AttributeError):
        # At the smallest scale it counts: the run ends, which asks the ranks first.
        guard.check(replace(report, overflowed=False), whole_batch(), "policy", 0)
    assert update_metrics([report, replace(report, loss_scale=2.0**19)], "policy")["policy/loss_scale"] == 2.0**19


HALVED = {"initial_loss_scale": 8192.0}


def scale_on_resume(mesh, directory: Path, root: Path, scale: dict[str, float]):
    """The scale of a run with other options that loads a checkpoint whose scale two overflows have halved once."""
    from fivefold.megatron.model import MegatronModel

    policies = [float16(**HALVED), float16(**scale)]
    before, now = (MegatronModel(directory, policy, mesh, total_updates=4) for policy in policies)
    for _ in range(2):
        before._updater.loss_scale.follow(overflowed=True)
    before.save(root)
    now.load(root)
    return float(now._updater.loss_scale.scale)


@pytest.mark.parametrize(("scale", "expected"), [
    (HALVED, 4096.0), (HALVED | {"loss_scale_window": 3}, 4096.0), ({"initial_loss_scale": 1024.0}, 1024.0),
    ({"loss_scale": 128.0}, 128.0),
])  # fmt: skip
def test_a_resumed_run_keeps_the_scale_unless_it_sets_another(cluster, models, tmp_path, scale, expected):
    assert cluster.run(scale_on_resume, "megatron:d1", models("qwen3"), tmp_path, scale) == [expected]
