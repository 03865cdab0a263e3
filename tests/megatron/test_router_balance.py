"""`policy.router_balance: config`: the balance loss of config.json, as ROLL trains mixture-of-experts models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.learners import MegatronConfig, PolicyConfig
from fivefold.models.config_json import read_balance_coef
from tests.support.two_steps import POLICY, ROUTER, expected, run_step


def test_the_balance_loss_of_config_json_equals_its_coefficient_written_out(cluster, models):
    directory = models("qwen3_moe")
    coef = json.loads((Path(directory) / "config.json").read_text())["router_aux_loss_coef"]
    assert coef > 0
    written = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": coef}
    oracle = expected(directory, replace(POLICY, megatron=MegatronConfig(transformer=ROUTER)))
    steps = {
        name: run_step(cluster, "d1", directory, policy, oracle=oracle)[0]
        for name, policy in (
            ("config", replace(POLICY, router_balance="config", megatron=MegatronConfig())),
            ("written", replace(POLICY, megatron=MegatronConfig(transformer=written))),
            ("none", replace(POLICY, megatron=MegatronConfig())),
        )
    }
    norms = {name: [report.grad_norm for report in reports] for name, (reports, _) in steps.items()}
    assert norms["config"] == norms["written"] != norms["none"]
    reports = steps["config"][0]
    assert reports[0].metrics["moe/aux_loss"] > 0


@pytest.mark.parametrize(
    ("given", "coef"), [({"router_aux_loss_coef": 0.02}, 0.02), ({"router_aux_loss_coef": 0}, 0), ({}, 0.001)]
)
def test_a_balance_coefficient_may_be_0_and_is_transformers_own_when_left_out(given, coef):
    assert read_balance_coef({"model_type": "qwen3_moe", **given}) == coef


def test_a_policy_with_balanced_routers_neither_skips_samples_nor_shares_prefixes():
    policy = PolicyConfig(router_balance="config", share_prefix=True)
    assert policy.has_router_terms and not policy.shares_prefix_on(policy.layout)
