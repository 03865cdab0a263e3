"""The learning rate of each optimizer step, as the optimizer used it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.learners import OptimizerConfig, PolicyConfig
from tests.support.two_steps import OBJECTIVE, whole_batch

LR, MIN = 1e-3, 1e-4


def rates(mesh, directory: Path, optimizer: OptimizerConfig, steps: int, updates_per_step: int = 1):
    """(learning rate told, largest change of a weight) of each step; SGD-like Adam moves a weight by about the rate."""
    from fivefold.megatron.model import MegatronModel

    policy = PolicyConfig(dtype="float32", optimizer=optimizer)
    model = MegatronModel(directory, policy, mesh, total_updates=steps, updates_per_step=updates_per_step)
    batch = whole_batch()
    batch = batch.with_columns(
        {Column.OLD_LOGPROBS: None, Column.REF_LOGPROBS: model.forward(batch) + batch[Column.REF_LOGPROBS]}
    )
    rates_and_changes, before = [], {name: tensor.clone() for name, tensor in model.weights()}
    for _ in range(steps):
        report = model.train_step(batch, OBJECTIVE.loss)
        after = {name: tensor.clone() for name, tensor in model.weights()}
        rates_and_changes.append((report.lr, max(float((after[name] - before[name]).abs().max()) for name in after)))
        before = after
    return rates_and_changes


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", lambda k: LR * min(1, k / 2)),
        ("linear", lambda k: LR * k / 2 if k <= 2 else MIN + (LR - MIN) * (1 - (k - 2) / 6)),
        ("cosine", lambda k: LR * k / 2 if k <= 2 else MIN + (LR - MIN) * (1 + math.cos(math.pi * (k - 2) / 6)) / 2),
    ],
)
def test_every_optimizer_step_uses_the_rate_of_its_schedule(cluster, models, schedule, expected):
    # With betas of 0 Adam moves each weight by lr * g / (|g| + eps): the largest change is the rate itself.
    optimizer = OptimizerConfig(lr=LR, min_lr=MIN if schedule != "constant" else 0.0, warmup_steps=2, schedule=schedule)
    optimizer = replace(optimizer, betas=[0.0, 0.0], weight_decay=0.0)
    rates_and_changes = cluster.run(rates, "megatron:d1", models("qwen3"), optimizer, 8)[0]
    assert [lr for lr, _ in rates_and_changes] == pytest.approx([expected(k) for k in range(1, 9)], rel=1e-6)
    assert [change for _, change in rates_and_changes] == pytest.approx([expected(k) for k in range(1, 9)], rel=1e-3)


@pytest.mark.parametrize(("begin", "expected"), [(0, [0.1, 0.325, 0.55, 0.775, 1, 1]), (1, [0.325, 0.55, 0.775, 1, 1, 1])])
def test_a_warm_up_rises_evenly_from_its_own_rate(cluster, models, begin, expected):
    optimizer = OptimizerConfig(lr=LR, warmup_steps=4, warmup_from=begin, warmup_init_lr=0.1 * LR)
    rates_and_changes = cluster.run(rates, "megatron:d1", models("qwen3"), optimizer, 6)[0]
    assert [lr / LR for lr, _ in rates_and_changes] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("per", "updates"), [("update", 1), ("step", 2), (4, 4)])
@pytest.mark.parametrize(
    ("schedule", "kind"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
def test_a_schedule_from_0_is_that_of_transformers_stepped_per_update_or_step(cluster, models, schedule, kind, per, updates):
    """What verl, ROLL and SkyRL do: torch's schedulers have rate 0 first, and verl's move once a step, or once in each batch
    of fully_async_policy, which is a part of a step."""
    from transformers import get_scheduler

    total = 8
    optimizer = OptimizerConfig(lr=LR, warmup_steps=0.25, warmup_from=0, schedule_per=per, schedule=schedule)
    updates_per_step = updates if per == "step" else total
    rates_and_changes = cluster.run(rates, "megatron:d1", models("qwen3"), optimizer, total, updates_per_step)[0]
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    oracle = get_scheduler(kind, adam, num_warmup_steps=total // updates // 4, num_training_steps=total // updates)
    expected = []
    for number in range(1, total + 1):
        expected.append(oracle.get_last_lr()[0])
        adam.step()
        if number % updates == 0:
            oracle.step()
    assert [lr for lr, _ in rates_and_changes] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def unclipped(mesh, directory: Path):
    from fivefold.megatron.model import MegatronModel

    norms = []
    for clip in (0.0, 1.0):
        policy = PolicyConfig(dtype="float32", optimizer=OptimizerConfig(lr=LR, clip_grad=clip, eps=1.0, weight_decay=0.0))
        model = MegatronModel(directory, policy, mesh, total_updates=1)
        before = {name: tensor.clone() for name, tensor in model.weights()}
        batch = whole_batch()
        batch = batch.with_columns(
            {Column.OLD_LOGPROBS: None, Column.REF_LOGPROBS: model.forward(batch) + batch[Column.REF_LOGPROBS]}
        )
        report = model.train_step(batch, OBJECTIVE.loss)
        moved = torch.stack([(tensor - before[name]).norm() for name, tensor in model.weights()]).norm()
        norms.append((report.grad_norm, float(moved)))
    return norms


def test_clip_grad_0_reports_the_norm_and_clips_nothing(cluster, models):
    (free_norm, free_move), (norm, clipped_move) = cluster.run(unclipped, "megatron:d1", models("qwen3"))[0]
    assert free_norm == pytest.approx(norm)
    assert norm > 2
    # With eps = 1 and one step Adam moves a weight by about lr * g: clipping divides that by the norm.
    assert free_move / clipped_move == pytest.approx(norm, rel=0.1)


def save_and_load(mesh, directory: Path, path: Path, second: OptimizerConfig):
    """A step, a save, and a step of a model that loaded it under another configuration: (rate, settings of its Adam)."""
    from fivefold.megatron.model import MegatronModel

    batch = whole_batch()
    first = OptimizerConfig(lr=LR, warmup_steps=0)
    model = MegatronModel(directory, PolicyConfig(dtype="float32", optimizer=first), mesh, total_updates=4)
    batch = batch.with_columns(
        {Column.OLD_LOGPROBS: None, Column.REF_LOGPROBS: model.forward(batch) + batch[Column.REF_LOGPROBS]}
    )
    model.train_step(batch, OBJECTIVE.loss)
    path.mkdir()
    model.save(path)
    other = MegatronModel(directory, PolicyConfig(dtype="float32", optimizer=second), mesh, total_updates=10)
    other.load(path)
    rate = other.train_step(batch, OBJECTIVE.loss).lr
    adam = other._updater.optimizer.chained_optimizers[0].optimizer
    steps = {float(state["step"]) for state in adam.state.values()}
    return rate, [(group["betas"], group["eps"], group["weight_decay"]) for group in adam.param_groups], steps, other.version


def test_a_resumed_run_obeys_its_own_configuration_and_keeps_its_count(cluster, models, tmp_path):
    second = OptimizerConfig(lr=LR / 2, betas=[0.7, 0.8], eps=1e-6, weight_decay=0.3, schedule="linear")
    rate, groups, steps, version = cluster.run(save_and_load, "megatron:d1", models("qwen3"), tmp_path / "c", second)[0]
    assert rate == pytest.approx(LR / 2 * (1 - 2 / 10))
    assert {(tuple(betas), eps) for betas, eps, _ in groups} == {((0.7, 0.8), 1e-6)}
    assert sorted(decay for *_, decay in groups) == pytest.approx([0.0, 0.3])
    assert steps == {2.0}, "one step before, one after: torch's Adam counted every parameter once"
    assert version == 2


def test_a_schedule_that_is_loaded_twice_counts_the_steps_of_the_second_only():
    """As on a rank that could read its part of a checkpoint which another rank found damaged."""
    from fivefold.backend.schedule import Schedule

    def schedule_after(*steps: int):
        adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        made = Schedule(adam, OptimizerConfig(lr=LR, min_lr=MIN, schedule="linear"), 10)
        for number in steps:
            saved = schedule_after()
            saved.step(number)
            made.load_state_dict(saved.state_dict())
        return made

    schedule, expected = schedule_after(4, 2), schedule_after(2)
    assert schedule.state_dict() == expected.state_dict()
    assert (schedule.num_steps, schedule.optimizer.param_groups[0]["lr"]) == (2, expected.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("settings", "at_step"),
    [
        (OptimizerConfig(lr=LR, schedule="linear"), lambda step: LR * (1 - step / 8)),
        (OptimizerConfig(lr=LR, schedule="linear", schedule_per="step", decay_steps=16), lambda step: LR * (1 - step / 16)),
        (OptimizerConfig(lr=LR, warmup_steps=0.75), lambda step: LR * min(1, step / 6)),
    ],
)
def test_a_schedule_keeps_its_step_where_a_resumed_run_takes_other_updates_per_step(settings, at_step):
    """Steps 1 to 4 of 8 have four updates, step 5 has two and the others have one; the count of updates stays as it is."""
    from fivefold.backend.schedule import Schedule

    state, rates, count = {"num_steps": 0}, [], 0
    for steps, updates in ((4, 4), (1, 2), (3, 1)):
        schedule = Schedule(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), settings, 8 * updates, updates)
        schedule.load_state_dict(json.loads(json.dumps(state)))
        assert schedule.num_steps == count
        for _ in range(steps):
            for _ in range(updates):
                schedule.step(1)
            rates.append(schedule.optimizer.param_groups[0]["lr"])
        count, state = count + steps * updates, schedule.state_dict()
    assert rates == pytest.approx([at_step(step) for step in range(1, 9)])


def test_a_schedule_in_updates_continues_where_a_resumed_run_takes_fewer_per_step():
    from fivefold.backend.schedule import Schedule

    settings = OptimizerConfig(lr=LR, schedule="linear", warmup_steps=10, decay_steps=40)
    schedule = Schedule(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), settings, 8)
    schedule.load_state_dict({"num_steps": 16, "position": 16.0, "updates_per_step": 4})
    schedule.step(1)
    assert schedule.optimizer.param_groups[0]["lr"] == pytest.approx(LR * (1 - 7 / 30))
