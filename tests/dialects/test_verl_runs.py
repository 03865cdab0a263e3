"""What a run of verl's is besides its method: its batch, its length, its schedule, and what is said of older releases."""

from __future__ import annotations

import pytest

from fivefold.config import RunConfig
from fivefold_dialects import writer
from tests.support.dialects import HOME, config, translate_words, translated

ACTOR = "actor_rollout_ref.actor."
BASE = [
    "data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm",
    "data.train_batch_size=16", ACTOR + "ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo",
]  # fmt: skip
DAPO = ["-m", "recipe.dapo.main_dapo", *BASE]
FILTER = ["algorithm.filter_groups.enable=True", "data.gen_batch_size=48"]


def run(*words, system="verl"):
    translation = translate_words(system, list(words), HOME)
    assert translation.refusals == []
    return RunConfig.of(translation.tree)


def notes(*words, system="verl"):
    return writer.notes(translate_words(system, list(words), HOME))


@pytest.mark.parametrize("program", [[], ["-m", "verl.trainer.main_ppo"], ["-m", "recipe.dapo.main_dapo"]])
def test_the_prompts_that_verls_loader_draws_are_the_batch_of_a_step(program):
    run_config = run(*program, *BASE, "data.gen_batch_size=48")
    assert (run_config.data.prompts_per_step, run_config.algorithm.updates_per_step) == (48, 3)
    assert any(
        "data.gen_batch_size = 48 is the batch of a step" in note
        for note in notes(*program, *BASE, "data.gen_batch_size=48")
    )


@pytest.mark.parametrize("words", [["data.gen_batch_size=48", "trainer.use_v1=True"], ["data.gen_batch_size=16"], FILTER])
def test_the_newer_trainer_and_dynamic_sampling_train_on_train_batch_size(words):
    run_config = run(*BASE, *words)
    assert (run_config.data.prompts_per_step, run_config.algorithm.updates_per_step) == (16, 1)


def test_a_batch_that_is_drawn_must_be_a_multiple_of_the_updates():
    translation = translated("verl", *BASE, "data.gen_batch_size=24")
    assert any("data.gen_batch_size = 24 is no multiple of it" in refusal for refusal in translation.refusals)


def test_a_run_with_dynamic_sampling_ends_with_the_data_that_its_rounds_draw():
    run_config = run(*DAPO, *FILTER, "trainer.total_epochs=2")
    assert (run_config.trainer.epochs, run_config.trainer.steps, run_config.trainer.ends_with_data) == (2, None, True)
    # 1,000 rows: two epochs of 20 rounds of 48, where as many updates of 16 would take 124 steps.
    assert (run_config.prompts_taken, 2 * (1000 // run_config.prompts_taken)) == (48, 40)


@pytest.mark.parametrize("words", [[], [*FILTER, "trainer.use_v1=True"]])
def test_a_run_that_counts_updates_has_as_many_as_its_epochs_say(words):
    run_config = run(*BASE, *words, "trainer.total_epochs=2")
    assert (run_config.trainer.epochs, run_config.trainer.ends_with_data, run_config.prompts_taken) == (2, False, 16)


@pytest.mark.parametrize("words", [BASE, ["model.path=m", "data.train_files=a.parquet", "optim.lr=1e-5"]])
def test_the_fewer_of_steps_and_epochs_end_a_run_of_verl(words):
    run_config = run(*words, "trainer.total_training_steps=500", "trainer.total_epochs=3")
    assert (run_config.trainer.steps, run_config.trainer.epochs, run_config.trainer.ends_with_data) == (500, 3, True)


@pytest.mark.parametrize(("words", "schedule", "warmup", "lowest"), [
    (["model_engine=veomni"], "cosine", 0.0, 0.0),
    (["actor_rollout_ref.actor.strategy=veomni", ACTOR + "optim.lr_min=1e-7", ACTOR + "optim.lr_warmup_steps_ratio=0.1"], "cosine", 0.1, 1e-7),
    (["model_engine=veomni", ACTOR + "optim.lr_scheduler_type=constant"], "constant", 0.0, 0.0),
    (["model_engine=torchtitan"], "linear", 0.0, 0.0),
    (["model_engine=torchtitan", ACTOR + "optim.min_lr_factor=0.1", ACTOR + "optim.decay_type=cosine"], "cosine", 0.0, 1e-7),
    (["model_engine=megatron"], "constant", 0.0, 0.0),
    ([], "constant", 0.0, 0.0),
])  # fmt: skip
def test_each_engine_of_verl_has_its_own_schedule(words, schedule, warmup, lowest):
    optimizer = run(*BASE, *words).policy.optimizer
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.min_lr) == (schedule, warmup, pytest.approx(lowest))


def test_the_critic_of_an_engine_has_its_schedule_too():
    words = [word for word in BASE if "adv_estimator" not in word]
    run_config = run(*words, "algorithm.adv_estimator=gae", "critic.model.path=c", "model_engine=veomni")
    assert run_config.critic.optimizer.schedule == "cosine"


def test_an_entropy_coefficient_that_is_left_out_is_named_with_its_older_default():
    (note,) = [note for note in notes(*BASE) if "entropy_coeff" in note]
    assert "0.001 before, with --from verl@2025-04" in note
    assert run(*BASE).algorithm.entropy_coef == 0 and run(*BASE, system="verl@2025-04").algorithm.entropy_coef == 0.001


@pytest.mark.parametrize(("words", "system"), [
    ([ACTOR + "entropy_coeff=0"], "verl"), ([], "verl@2025-04"), (["actor_rollout_ref.rollout.mode=async"], "verl"),
    ([ACTOR + "policy_loss.loss_mode=vanilla"], "verl"), ([], "siirl"),
])  # fmt: skip
def test_what_cannot_be_of_an_older_release_is_not_asked_about_its_entropy(words, system):
    assert not any("entropy_coeff" in note for note in notes(*BASE, *words, system=system))


@pytest.mark.parametrize(("words", "is_said"), [
    ([], True), ([ACTOR + "loss_agg_mode=token-mean"], True), ([ACTOR + "loss_agg_mode=seq-mean-token-mean"], False),
    (["trainer.use_legacy_worker_impl=disable"], False), (["trainer.use_v1=True"], False),
    (["trainer.use_legacy_worker_impl=auto"], True),
])  # fmt: skip
def test_a_mean_over_micro_batches_that_becomes_one_over_the_update_is_said(words, is_said):
    notes_of_mean = [note for note in notes(*BASE, *words) if "mean over the tokens of each micro-batch" in note]
    assert (
        bool(notes_of_mean) == is_said
        and config("verl", *BASE, *words).algorithm.resolved.aggregate != "micro-batch-token-mean"
    )
    assert ("# Note: with token-mean" in writer.write(translated("verl", *BASE, *words), "verl")) == is_said


@pytest.mark.parametrize("words", [BASE, ["model.path=m", "data.train_files=a.parquet", "optim.lr=1e-5"]])
def test_a_schedule_of_verl_goes_over_total_training_steps_even_with_fewer_data(words):
    start = ACTOR if words is BASE else ""
    more = [
        f"{start}optim.lr_scheduler_type=cosine",
        f"{start}optim.lr_warmup_steps_ratio=0.05",
        "trainer.total_training_steps=500",
    ]
    optimizer = run(*words, *more).policy.optimizer
    assert (optimizer.decay_steps, optimizer.warmup_steps) == (500, 25)
