"""verl's recipe of PRIME: the run that its script asks for, in numbers written by hand, and what is refused."""

from __future__ import annotations

from operator import attrgetter

import pytest

from fivefold.config import RunConfig
from fivefold.config.dialect import find_dialect

HOME = {"HOME": "/home/me"}
SCRIPT = [
    "-m=recipe.prime.main_prime",
    "data.train_files=['/d/gsm8k.parquet','/d/math.parquet']",
    "data.val_files=/d/test.parquet",
    "data.train_batch_size=64",
    "data.val_batch_size=6312",
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
    "data.filter_overlong_prompts=True",
    "data.filter_accuracy=True",
    "data.accuracy_lower_bound=0.2",
    "data.accuracy_upper_bound=0.8",
    "data.oversample_factor=4",
    "actor_rollout_ref.model.path=sft",
    "actor_rollout_ref.actor.optim.lr=5e-7",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=rloo",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_penalty=kl",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "reward_model.model.path=sft",
    "reward_model.micro_batch_size_per_gpu=2",
    "reward_model.model.update=before",
    "reward_model.model.beta_train=0.05",
    "reward_model.model.optim.lr=1e-6",
    "reward_model.model.optim.grad_clip=10.0",
    "reward_model.model.input_tokenizer=null",
    "reward_model.mini_batch_size=64",
    "trainer.logger=console",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
]
"""Of verl-recipe's run_prime_qwen.sh."""


def translated(*words: str):
    return find_dialect("verl")({}, [*SCRIPT, *words], environment=HOME)  # type: ignore[call-arg]


def config(*words: str) -> RunConfig:
    translation = translated(*words)
    assert translation.refusals == []
    return RunConfig.of(translation.tree)


EXPECTED = {
    # 64 x 4 prompts are sampled at once, and a quarter of them is learned from: 256 responses in one update.
    "data.prompts_per_step": 64,
    "algorithm.group_size": 4,
    "algorithm.updates": 1,
    "algorithm.prompts_per_round": 256,
    "algorithm.sampling_rounds": 1,
    "prompts_taken": 256,
    "algorithm.resolved.dynamic_sampling": True,
    "algorithm.resolved.dynamic_sampling_low": 0.2,
    "algorithm.resolved.dynamic_sampling_high": 0.8,
    # Left out from 3071 tokens on.
    "algorithm.resolved.dynamic_sampling_max_tokens": 3070,
    "algorithm.resolved.advantage": "leave_one_out",
    "algorithm.resolved.normalize": "none",
    "algorithm.resolved.credit": "discounted",
    "algorithm.resolved.gamma": 1.0,
    "algorithm.resolved.whiten": True,
    "algorithm.resolved.surrogate": "ppo_clip",
    "algorithm.resolved.clip_low": 0.2,
    "algorithm.resolved.clip_high": 0.2,
    "algorithm.resolved.dual_clip": 3.0,
    "algorithm.resolved.aggregate": "token-mean",
    # prime_trainer.yaml; what use_kl_in_reward asks for is nowhere taken off.
    "algorithm.resolved.entropy_coef": 0.001,
    "algorithm.resolved.kl.coef": 0.0,
    "algorithm.needs_reference": False,
    "algorithm.resolved.process_reward.coef": 5.0,
    "algorithm.resolved.process_reward.outcome_coef": 5.0,
    "algorithm.resolved.process_reward.beta": 0.05,
    "algorithm.resolved.process_reward.granularity": "token",
    "algorithm.resolved.process_reward.normalize": "step",
    "algorithm.resolved.process_reward.loss": "ce",
    "algorithm.resolved.process_reward.update": "before",
    "algorithm.resolved.process_reward.target": "reward",
    "algorithm.resolved.process_reward.reference": "initial",
    # Its mini-batches are 64 responses, those of the policy 64 prompts.
    "prm.updates_per_step": 4,
    "prm.path": "sft",
    "prm.reference_path": None,
    "prm.reference.path": "sft",
    "prm.optimizer.lr": 1e-6,
    "prm.optimizer.weight_decay": 0.0,
    "prm.optimizer.clip_grad": 10.0,
    "prm.optimizer.schedule": "constant",
    "prm.recompute": "full",
    "prm.tokens_per_micro_batch": 2 * 4096,
    "prm.offload.parameters": True,
    "prm.offload.optimizer": True,
    "prm.offload.gradients": False,
    "policy.optimizer.lr": 5e-7,
    "policy.backend": "fsdp:d8t1",
    "reward.model.path": None,
    "reward.functions": {},
    "trainer.eval_before_train": False,
}


@pytest.mark.parametrize("key", EXPECTED)
def test_the_script_s_run_is_the_one_that_is_asked_for(key):
    assert attrgetter(key)(config()) == EXPECTED[key]


CHANGES = {
    "rewards as they are": (["reward_model.prime_norm=none"], {"algorithm.resolved.process_reward.normalize": "none"}),
    "after": (["reward_model.model.update=after", "reward_model.mini_batch_size=256"],
              {"algorithm.resolved.process_reward.update": "after", "prm.updates_per_step": 1}),
    "dpo": (["reward_model.model.update=reverse", "reward_model.model.loss_type=dpo", "reward_model.mini_batch_size=256"],
            {"algorithm.resolved.process_reward.loss": "dpo", "algorithm.resolved.process_reward.update": "after"}),
    "another reference": (["reward_model.model.ref_path=base"], {"prm.reference_path": "base", "prm.path": "sft"}),
    "warm-up": (["reward_model.model.optim.lr_warmup_steps=7"], {"prm.optimizer.warmup_steps": 7, "prm.optimizer.warmup_from": 0}),
    "by length alone": (["data.filter_accuracy=False"],
                        {"algorithm.resolved.dynamic_sampling_high": None, "algorithm.resolved.dynamic_sampling_max_tokens": 3070}),
    "by accuracy alone": (["data.filter_truncate=False"], {"algorithm.resolved.dynamic_sampling_max_tokens": None}),
    "no more than needed": (["data.oversample_factor=1"], {"algorithm.resolved.dynamic_sampling": False, "data.prompts_per_step": 64}),
    "outcomes alone": (["algorithm.reward_dpo_coef=0"], {"roles.further_learners": {}, "algorithm.resolved.whiten": True}),
    "without the model": (["reward_model.enable=False"], {"roles.further_learners": {}}),
    "weights": (["algorithm.reward_gt_coef=2", "algorithm.reward_dpo_coef=3"],
                {"algorithm.resolved.process_reward.coef": 3.0, "algorithm.resolved.process_reward.outcome_coef": 2.0}),
    # Steps are counted from 1, and the run ends where the number is that of the total.
    "length": (["trainer.total_training_steps=10"], {"trainer.steps": 9}),
    "a penalty in the loss": (["actor_rollout_ref.actor.use_kl_loss=True"],
                              {"algorithm.resolved.kl.coef": 0.001, "algorithm.resolved.kl.place": "loss", "algorithm.resolved.kl.reward_coef": 0.0}),
    "sequence parallel": (["reward_model.ulysses_sequence_parallel_size=2"], {"prm.backend": "fsdp:d4t1c2"}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_key_changes_what_it_says(change):
    words, expected = CHANGES[change]
    run = config(*words)
    assert {key: attrgetter(key)(run) for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["algorithm.adv_estimator=grpo"], "another advantage than rloo"),
        (["reward_model.prime_granularity=whole"], "whole, with which the recipe fails"),
        (["reward_model.model.update=none"], "a reward model that does not learn"),
        (["reward_model.model.loss_type=bon_acc"], "bon_acc"),
        (["reward_model.model.loss_type=dpo"], "dpo without update=reverse"),
        (["reward_model.model.update=after"], "rewards of an update's responses by the model"),
        (["reward_model.mini_batch_size=100"], "updates of 100 responses"),
        (["reward_model.mini_batch_size=512"], "updates of 512 responses"),
        (["reward_model.use_dynamic_bsz=True"], "not divided by the number of responses"),
        (["data.filter_accuracy=False", "data.filter_truncate=False"], "dropped without a rule"),
        (["algorithm.reward_gt_coef=0"], "without outcome rewards"),
        (["-m=verl.trainer.main_ppo"], "a separate program: set -m=recipe.prime.main_prime"),
    ],
)
def test_what_the_recipe_does_not_do_or_this_does_not_is_refused(words, told):
    refusals = [str(refusal) for refusal in translated(*words).refusals]
    assert any(told in refusal for refusal in refusals), refusals
