"""ROLL's own defaults, of today and of older releases, and what it computes of rewards: by hand, from its code.

Dates are those of ROLL's history up to 8eb27cc2 (rlvr_config.py, training_args.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.objective import Objective
from fivefold.columns import Column
from fivefold.config.dialect import find_dialect
from fivefold.config.loader import read_mapping
from fivefold.types import TokenBatch
from tests.support.dialects import HOME, config, translated
from tests.support.objectives import Alone

RUN = """
pretrain: m
rollout_batch_size: 8
num_return_sequences_in_group: 8
adv_estimator: grpo
rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}
actor_train:
  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 8}
  data_args: {file_name: [d.jsonl]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 1}}
  device_mapping: list(range(0,8))
actor_infer:
  strategy_args: {strategy_name: vllm}
"""
SFT = """
pretrain: m
sequence_length: 512
sft_train:
  training_args: {num_train_epochs: 1}
  data_args: {file_name: d.jsonl}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 1}}
  device_mapping: list(range(0,8))
"""


@pytest.mark.parametrize(
    ("release", "aggregate", "warmup"),
    [("", "seq-mean-token-mean", 0), ("2025-08", "seq-mean-token-sum", 0.03), ("2025-05", "token-mean", 0.03)],
)
def test_what_a_roll_configuration_leaves_out_is_what_its_release_had(release, aggregate, warmup):
    translation = find_dialect("roll")(read_mapping(RUN, "f"), [], HOME, release)
    assert translation.tree["algorithm"]["aggregate"] == aggregate
    assert translation.tree["policy"]["optimizer"]["warmup_steps"] == warmup
    with_a_choice = find_dialect("roll")(read_mapping(RUN, "f"), ["loss_agg_mode=token-mean"], HOME, release)
    assert with_a_choice.tree["algorithm"]["aggregate"] == "token-mean"


def test_a_roll_configuration_that_only_older_releases_read_has_their_defaults():
    translation = translated("roll", "reward_norm=group", tree=RUN)
    assert translation.release == "2025-08" and translation.tree["algorithm"]["aggregate"] == "seq-mean-token-sum"
    with pytest.raises(ValueError, match="2025-05"):
        find_dialect("roll")(read_mapping(RUN, "f"), [], HOME, "2024-01")


def test_roll_samples_with_its_own_temperature_and_nucleus_when_nothing_is_said():
    run = config("roll", "difficulty_mask=true", tree=RUN)
    assert (run.engine.sampling.temperature, run.engine.sampling.top_p, run.engine.sampling.top_k) == (0.95, 0.7, 50)
    assert (run.algorithm.resolved.difficulty_low, run.algorithm.resolved.difficulty_high) == (0.0, 1.0)


def test_roll_sft_learns_from_prompt_query_and_system_message_in_the_files_order():
    data = config("roll", "query_key=input", "system_key=rule", tree=SFT).data
    assert (data.prompt_key, data.query_key, data.system_key, data.response_key) == (
        "instruction",
        "input",
        "rule",
        "output",
    )
    assert data.shuffle is False
    plain = config("roll", "prompt_key=q", "response_key=a", tree=SFT).data
    assert (plain.prompt_key, plain.query_key, plain.system_key, plain.response_key) == ("q", None, None, "a")


def by_roll(rewards_N: Tensor, kl_T: Tensor, gamma: float, coef: float) -> Tensor:
    """compute_token_reward and compute_reinforce_return, where rewards were normalized in their group before."""
    normal_N = (rewards_N - rewards_N.mean()) / (rewards_N.std() + 1e-6)
    returns = []
    for reward, kl_L in zip(normal_N, kl_T.split(3), strict=True):
        token_L = -coef * kl_L
        token_L[-1] += reward
        returns.append(torch.stack([sum(gamma**i * x for i, x in enumerate(token_L[t:])) for t in range(3)]))
    return torch.cat(returns)


@pytest.mark.parametrize(
    ("words", "gamma", "coef"),
    [
        (["add_token_level_kl=true", "init_kl_coef=0.3"], 1.0, 0.3),
        (["add_token_level_kl=true", "init_kl_coef=0.3", "gamma=0.9"], 0.9, 0.3),
        (["gamma=0.9"], 0.9, 0.0),
        ([], 1.0, 0.0),
        (["add_token_level_kl=true", "use_kl_loss=true", "kl_loss_coef=0.01"], 1.0, 0.2),
    ],
)
def test_roll_normalizes_rewards_first_and_takes_the_kl_off_each_token(words, gamma, coef):
    """Its init_kl_coef is 0.2 when left out; with a KL in the loss besides, tokens lose theirs all the same."""
    chosen = config("roll", *words, tree=RUN).algorithm.resolved
    rewards_N, old_T = torch.tensor([1.0, 0.0]), torch.tensor([0.0, -1.0, -0.5, -2.0, 0.0, -0.1, -0.7, -0.2])
    ref_T = torch.tensor([0.0, -0.4, -0.9, -1.0, 0.0, -0.6, -0.5, -0.8])
    batch = TokenBatch(
        token_ids_T=torch.zeros(8, dtype=torch.long),
        loss_mask_T=torch.tensor([False, True, True, True] * 2),
        lengths_N=[4, 4],
        columns={Column.OLD_LOGPROBS: old_T, Column.REF_LOGPROBS: ref_T},
    )
    inputs = AdvantageInputs(rewards_N, group_N=torch.tensor([0, 0]), lengths_N=torch.tensor([3, 3]))
    advantages_T, _ = Objective.of(chosen).advantages(batch, inputs, torch.tensor([True, True]), Alone())
    expected_T = by_roll(rewards_N, (old_T - ref_T)[batch.loss_mask_T], gamma, coef)
    torch.testing.assert_close(advantages_T[batch.loss_mask_T], expected_T, rtol=1e-5, atol=1e-5)
    in_loss = 0.01 if "use_kl_loss=true" in words else 0.0
    assert (chosen.kl.coef if chosen.kl.place == "loss" else 0.0) == in_loss


def test_a_kl_estimator_that_roll_has_and_we_lack_is_refused_not_replaced():
    translation = translated("roll", "add_token_level_kl=true", "kl_penalty=full", tree=RUN)
    assert [text for text in translation.refusals if "kl_penalty=full: the estimator full" in text]


def test_routers_of_a_roll_run_are_balanced_by_config_json_or_by_its_own_key():
    policy = config("roll", tree=RUN).policy
    assert (policy.router_balance, policy.megatron.transformer) == ("config", {})
    of_model = "actor_train.model_args.moe_aux_loss_coef=0.02"
    of_options = "actor_train.strategy_args.strategy_config.moe_aux_loss_coeff=0.03"
    assert config("roll", of_model, tree=RUN).policy.megatron.transformer == {"moe_aux_loss_coeff": 0.02}
    assert config("roll", of_model, of_options, tree=RUN).policy.megatron.transformer == {"moe_aux_loss_coeff": 0.03}
    other = config("roll", "actor_train.strategy_args.strategy_name=deepspeed_train", tree=RUN)
    assert other.policy.router_balance == "none", "transformers' models add no balance loss unless asked to"
