"""Keys of other systems that decide together, or whose absence has a value: our run has the numbers of theirs."""

from __future__ import annotations

import pytest

from tests.dialects.test_dialects import DPO_ROLL, GRPO_VERL, GSM8K_AREAL, PPO_ROLL, PPO_TRINITY, SKYRL, VERL
from tests.support.dialects import config, translated

VAL, ROLLOUT = "actor_rollout_ref.rollout.val_kwargs.", "actor_rollout_ref.rollout."
PPO_SKYRL = [*SKYRL, "trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=c"]
PPO_VERL = [*VERL, "algorithm.adv_estimator=gae", "critic.model.path=c"]


@pytest.mark.parametrize(
    ("system", "words", "tree", "clip"),
    [
        ("roll", [], PPO_ROLL, None),
        ("roll", ["value_clip=0.3"], PPO_ROLL, 0.3),
        ("roll", ["value_clip=null"], PPO_ROLL, None),
        ("skyrl", PPO_SKYRL, "", 0.2),
        ("skyrl", [*PPO_SKYRL, "trainer.algorithm.value_clip=null"], "", None),
    ],
)
def test_a_critic_without_a_clip_has_none_here(system, words, tree, clip):
    assert config(system, *words, tree=tree).critic.value_clip == clip


@pytest.mark.parametrize(
    ("system", "words", "tree", "policy", "critic"),
    [
        ("roll", [], PPO_ROLL, "seq-mean-token-mean", None),
        ("roll", ["loss_agg_mode=seq-mean-token-sum"], PPO_ROLL, "seq-mean-token-sum", "seq-mean-token-mean"),
        ("skyrl", PPO_SKYRL, "", "token-mean", "seq-mean-token-mean"),
        ("trinity", [], PPO_TRINITY, "token-mean", None),
        ("trinity", ["algorithm.loss_agg_mode=seq-mean-token-mean"], PPO_TRINITY, "seq-mean-token-mean", "token-mean"),
        ("siirl", PPO_VERL, "", "token-mean", None),
        (
            "siirl",
            [*PPO_VERL, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"],
            "",
            "seq-mean-token-mean",
            "token-mean",
        ),
        ("siirl", [*PPO_VERL, "actor_rollout_ref.actor.policy_loss.loss_mode=cpgd"], "", "token-mean", None),
        ("verl", [*PPO_VERL, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"], "", "seq-mean-token-mean", None),
        ("verl", PPO_VERL, "", "token-mean", None),
        ("verl", [*PPO_VERL, "critic.loss_agg_mode=seq-mean-token-mean"], "", "token-mean", "seq-mean-token-mean"),
        ("verl", [*PPO_VERL, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], "", "seq-mean-token-mean", "token-mean"),
    ],
)
def test_the_critics_loss_has_the_mean_that_it_has_there(system, words, tree, policy, critic):
    chosen = config(system, *words, tree=tree).algorithm.resolved
    assert (chosen.aggregate, chosen.value_aggregate) == (policy, critic)


@pytest.mark.parametrize(
    ("words", "schedule", "epochs", "decay"),
    [
        ([], "constant", 1, None),
        (["actor_train.training_args.num_train_epochs=10"], "constant", 10, None),
        (["actor_train.training_args.lr_scheduler_type=cosine"], "cosine", 1, 100),
    ],
)
def test_dpo_of_roll_ends_with_its_steps_or_its_epochs_and_decays_over_the_steps(words, schedule, epochs, decay):
    run = config("roll", *words, tree=DPO_ROLL)
    assert (run.trainer.steps, run.trainer.epochs, run.trainer.ends_with_data) == (100, epochs, True)
    assert (run.policy.optimizer.schedule, run.policy.optimizer.decay_steps) == (schedule, decay)


def test_a_run_of_areal_that_ends_early_keeps_the_schedule_of_its_epochs():
    long, short = (config("areal", *words, tree=GSM8K_AREAL) for words in ([], ["total_train_steps=16"]))
    assert (long.policy.optimizer.schedule_over, long.trainer.steps, long.trainer.ends_with_data) == ("run", None, False)
    assert (short.policy.optimizer.schedule_over, short.trainer.steps, short.trainer.epochs) == ("data", 16, 10)
    assert short.trainer.ends_with_data


@pytest.mark.parametrize("system", ["verl", "siirl"])
def test_the_engines_response_length_comes_before_that_of_the_data(system):
    run = config(system, *GRPO_VERL, ROLLOUT + "response_length=8192")
    assert config(system, *GRPO_VERL).data.max_response_tokens == 1536
    assert (run.data.max_prompt_tokens, run.data.max_response_tokens) == (512, 8192)
    short = [
        note for note in translated(system, *GRPO_VERL, ROLLOUT + "max_model_len=1024").notes if "max_model_len" in note
    ]
    assert short and "max_model_len=1024 ends responses in verl where prompt and response have as many tokens" in short[0]


@pytest.mark.parametrize(
    ("system", "words", "samples"),
    [
        ("verl", [], 0),
        ("verl", [VAL + "temperature=1.0", VAL + "n=4"], 4),
        ("verl", [VAL + "do_sample=true", VAL + "n=4"], 0),
        ("verl", [VAL + "temperature=1.0", ROLLOUT + "mode=sync"], 0),
        ("verl", [VAL + "temperature=1.0", ROLLOUT + "name=hf"], 0),
        ("verl", [VAL + "temperature=1.0", VAL + "do_sample=true", ROLLOUT + "mode=sync"], 1),
        ("siirl", [VAL + "temperature=1.0"], 0),
        ("siirl", [VAL + "temperature=1.0", VAL + "do_sample=true"], 1),
    ],
)
def test_verls_agent_loop_samples_in_evaluation_without_do_sample(system, words, samples):
    assert config(system, *GRPO_VERL, *words).eval.samples == samples


@pytest.mark.parametrize(
    ("words", "samples", "temperature"),
    [
        ([], 0, 1.0),
        (["generator.eval_sampling_params.top_p=0.9"], 1, 1.0),
        (["generator.eval_sampling_params.top_p=0.9", "generator.eval_sampling_params.temperature=0.0"], 0, 1.0),
        (["generator.eval_sampling_params.temperature=0.6", "generator.eval_n_samples_per_prompt=4"], 4, 0.6),
        (["generator.eval_sampling_params.top_p=0.9", "generator.backend=vllm"], 0, 1.0),
    ],
)
def test_skyrls_own_sampling_in_evaluation_has_the_defaults_of_its_class(words, samples, temperature):
    """The last has a key of skyrl-train, where the temperature in evaluation was 0."""
    chosen = config("skyrl", *SKYRL, *words).eval
    assert (chosen.samples, chosen.temperature) == (samples, temperature)


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (["generator.eval_sampling_params.top_p=0.9"], True),
        (["generator.eval_sampling_params.max_generate_length=2048"], False),
        (["generator.eval_sampling_params.top_p=0.9", "generator.sampling_params.max_generate_length=1024"], False),
    ],
)
def test_skyrls_limit_of_evaluation_is_said_where_it_is_another_one(words, is_said):
    length = (
        [] if any("max_generate_length" in word for word in words) else ["generator.sampling_params.max_generate_length=64"]
    )
    notes = translated("skyrl", *SKYRL, *length, *words).notes
    assert any("ends responses in evaluation at 1024 tokens" in note for note in notes) == is_said
