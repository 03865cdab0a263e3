"""engine.logprobs: tenth_step requests log-probs where something reads them, and in every tenth step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fivefold.config.schema import AlgorithmConfig
from fivefold.engines.vllm.parameters import sampling_arguments
from fivefold.keys.findings import Findings
from fivefold.keys.typed import make
from fivefold.rollout.logprob_steps import LogprobSteps
from fivefold.rollout.sources import EngineRollouts
from fivefold.types import Sampling

SAMPLING = Sampling(max_tokens=4)


def asked(steps, armed=(), restarts=None):
    """The steps whose requests ask for log-probs; `armed`: steps with an armed gate; `restarts`: step -> restarts by then."""
    step = 0
    rule = LogprobSteps(lambda: step in armed, lambda: (restarts or {}).get(step, 0))
    steps_with_logprobs = []
    for step in steps:
        if rule.of(SAMPLING, step).logprobs:
            steps_with_logprobs.append(step)
    return steps_with_logprobs


def test_every_tenth_step_has_log_probs_and_the_first_after_a_start():
    assert asked(range(25)) == [0, 10, 20]
    assert asked(range(13, 25)) == [13, 20]


def test_while_the_gate_is_armed_every_step_has_log_probs():
    assert asked(range(13, 22), armed=(13, 14, 15)) == [13, 14, 15, 20]


def test_the_step_after_a_restart_of_servers_has_log_probs():
    assert asked(range(1, 8), restarts={1: 0, 4: 1, 5: 1, 6: 1, 7: 2, 2: 0, 3: 0}) == [1, 4, 7]


def test_all_samples_of_a_step_are_asked_alike():
    rule, armed = LogprobSteps(lambda: armed[0], lambda: 0), [False]
    rule.of(SAMPLING, 3)
    assert not rule.of(SAMPLING, 4).logprobs
    armed[0] = True
    assert not rule.of(SAMPLING, 4).logprobs
    assert rule.of(SAMPLING, 5).logprobs


@pytest.mark.parametrize("rule", [None, LogprobSteps(lambda: False, lambda: 0)], ids=["always", "tenth_step"])
def test_the_source_of_a_run_asks_as_the_rule_says(rule):
    seen = []
    generator = SimpleNamespace(
        sample=lambda prompts, size, sampling, draw, counts: seen.append(sampling.logprobs) or [],
        record_counts=lambda counts: None,
    )
    prompts = SimpleNamespace(has=lambda count: True, take=lambda count: [])
    source = EngineRollouts(generator, prompts, None, SAMPLING, seed=0, group_size=2, prompts_per_call=1, logprobs=rule)
    for step in range(1, 12):
        source.next(step)
    assert seen == [rule is None or step in (1, 10) for step in range(1, 12)]


@pytest.mark.parametrize(
    ("chosen", "is_read"),
    [
        ({}, False),
        ({"rollout_correction": {"name": "tis"}}, True),
        ({"rollout_correction": {"reject": "geometric"}}, True),
        ({"rollout_correction": {"reject_divergence": {"second_moment": 0.04}}}, True),
        ({"rollout_correction": {"old_logprobs_from": "engine"}}, True),
        ({"advantage": "mine.py:function"}, True),
    ],
    ids=str,
)
def test_a_correction_and_user_code_have_the_log_probs_of_every_step(chosen, is_read):
    findings = Findings()
    config = make(AlgorithmConfig, {"name": "grpo", **chosen}, findings)
    assert not findings.errors and config.reads_rollout_logprobs == is_read


def test_vllm_is_asked_for_the_drawn_token_s_log_prob_alone_or_for_none():
    assert sampling_arguments(SAMPLING, ())["logprobs"] == 0
    assert sampling_arguments(replace(SAMPLING, logprobs=False), ())["logprobs"] is None
