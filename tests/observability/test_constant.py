"""What a run's settings make constant is named with its reason; what only happens to be constant is not."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from fivefold.config import RunConfig
from fivefold.config.roles import LEARNERS
from fivefold.observability.constant import CONSTANTS, constant_reasons
from fivefold.observability.metrics import find

ON_POLICY = {"algorithm": {"updates_per_step": 1, "ppo_epochs": 1}}


def rows(name, *values):
    return [{"step": step, name: value} for step, value in enumerate(values)]


def test_the_ratio_of_one_update_a_step_is_constant_and_the_reason_says_so():
    (reason,) = constant_reasons(ON_POLICY, rows("policy/ratio_mean", 1.0, 1.0000001, 1.0)).values()
    assert "one update" in reason and "algorithm.updates_per_step" in reason


@pytest.mark.parametrize("values", [(1.0, 1.2), (2.0, 2.0), ()])
def test_values_that_contradict_the_reason_are_shown(values):
    assert constant_reasons(ON_POLICY, rows("policy/ratio_mean", *values)) == {}


@pytest.mark.parametrize("config", [{}, {"algorithm": None}, {"algorithm": {"updates_per_step": 2, "ppo_epochs": 1}}])
def test_without_the_settings_nothing_is_constant_by_construction(config):
    assert constant_reasons(config, rows("policy/clip_fraction", 0.0, 0.0)) == {}


def test_a_reward_that_never_changes_is_no_construction():
    names = {name for row in CONSTANTS for name in row.values}
    assert not any(name.startswith(("reward/", "val/", "response/", "policy/loss", "policy/grad_norm")) for name in names)


def test_a_warm_up_makes_the_learning_rate_worth_a_chart():
    constant = {"policy": {"optimizer": {"schedule": "constant", "warmup_steps": 0.0}}}
    warm = {"policy": {"optimizer": {"schedule": "constant", "warmup_steps": 5}}}
    assert constant_reasons(constant, rows("policy/lr", 1e-6, 1e-6)) and not constant_reasons(warm, rows("policy/lr", 1, 1))
    assert not constant_reasons(constant, rows("policy/lr", 1e-6, 2e-6)), "a tiny rate that changes is not constant"


@pytest.mark.parametrize("model", LEARNERS)
def test_the_constant_rate_of_every_trained_model_is_folded(model):
    config = {model: {"optimizer": {"schedule": "constant", "warmup_steps": 0}}}
    (reason,) = constant_reasons(config, rows(f"{model}/lr", 1e-5, 1e-5)).values()
    assert reason.startswith(f"{model}.optimizer.schedule")


def test_every_metric_and_key_of_the_table_exists():
    config = asdict(RunConfig.of(model={"path": "x"}, data={"train": ["x.jsonl"]}))
    for row in CONSTANTS:
        assert all(find(name) is not None for name in row.values)
        for key in row.settings:
            section = config
            for part in key.split("."):
                assert part in section, key
                section = section[part]
