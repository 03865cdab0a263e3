"""verl's releases and engines: what a configuration means by the release that it is of."""

from __future__ import annotations

import pytest

from fivefold.config import RunConfig
from fivefold_dialects import writer
from tests.support.dialects import HOME, config, translate_words, translated

GRPO = [
    "data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm",
    "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo",
]  # fmt: skip
ACTOR = "actor_rollout_ref.actor."


def of_release(release, *words):
    translation = translate_words(f"verl@{release}" if release else "verl", [*GRPO, *words], HOME)
    assert translation.refusals == []
    return RunConfig.of(translation.tree).algorithm.resolved


@pytest.mark.parametrize(("release", "kl", "entropy", "dual_clip", "low", "high"), [
    # ppo_trainer.yaml of v0.2 and v0.3.0.post1: KL off rewards by 0.001, entropy 0.001, one clip_ratio, no second clip.
    ("2025-02", ("reward", "k1", 0.001), 0.001, None, 0.3, 0.3),
    ("2025-03", ("reward", "k1", 0.001), 0.001, None, 0.3, 0.3),
    # From 2025-04-04 two bounds of their own, which clip_ratio does not move; entropy until 2025-04-17.
    ("2025-04", None, 0.001, 3.0, 0.2, 0.2),
    ("", None, 0.0, 3.0, 0.2, 0.2),
])  # fmt: skip
def test_a_release_has_its_own_defaults_of_kl_entropy_and_clip(release, kl, entropy, dual_clip, low, high):
    chosen = of_release(release, ACTOR + "clip_ratio=0.3")
    assert (chosen.entropy_coef, chosen.dual_clip, chosen.clip_low, chosen.clip_high) == (entropy, dual_clip, low, high)
    assert (chosen.kl.place, chosen.kl.estimator, chosen.kl.coef) == kl if kl else chosen.kl.coef == 0


def test_a_release_without_the_key_has_no_kl_in_rewards_if_the_loss_has_one():
    chosen = of_release("2025-03", ACTOR + "use_kl_loss=True", ACTOR + "kl_loss_coef=0.01")
    assert (chosen.kl.place, chosen.kl.coef, chosen.kl.reward_coef) == ("loss", 0.01, 0.0)


@pytest.mark.parametrize("gone", [
    "trainer.val_generations_to_log_to_wandb=0", "trainer.remove_previous_ckpt_in_save=True",
    "critic.model.fsdp_config.grad_offload=False",
])  # fmt: skip
def test_a_key_that_is_gone_says_of_which_release_a_configuration_is(gone):
    """No later release starts with it, so the defaults are those of its own: KL in the reward and an entropy bonus."""
    algorithm = config("verl", *GRPO, gone).algorithm.resolved
    assert (algorithm.kl.place, algorithm.kl.coef, algorithm.entropy_coef) == ("reward", 0.001, 0.001)


@pytest.mark.parametrize(
    "newer", ["algorithm.use_kl_in_reward=False", ACTOR + "loss_agg_mode=token-mean", "-m=verl.trainer.main_ppo_async"]
)
def test_a_fork_with_older_and_newer_keys_has_the_latest_defaults(newer):
    more = ["trainer.n_training_gpus_per_node=4"] if newer.startswith("-m") else []
    algorithm = config("verl", *GRPO, "trainer.remove_previous_ckpt_in_save=True", newer, *more).algorithm.resolved
    assert (algorithm.kl.coef, algorithm.entropy_coef) == (0, 0)


def test_a_coefficient_that_verl_once_read_is_spoken_of():
    """kl_ctrl.kl_coef alone does nothing since 2025-04; who has a script of before is told."""
    alone = translated("verl", *GRPO, "algorithm.kl_ctrl.kl_coef=0.001")
    about = [outcome for outcome in alone.outcomes if outcome.key == "algorithm.kl_ctrl.kl_coef"]
    assert (
        [outcome.kind for outcome in about] == ["unsupported"] and not alone.refusals and "verl@2025-03" in about[0].reason
    )
    for more in ("algorithm.use_kl_in_reward=False", ACTOR + "use_kl_loss=True"):
        plain = translated("verl", *GRPO, "algorithm.kl_ctrl.kl_coef=0.001", more)
        assert not any(outcome.kind == "unsupported" for outcome in plain.outcomes)


@pytest.mark.parametrize("kwargs", ["mcore_kwargs", "llm_kwargs"])
def test_mindspeeds_engine_has_the_layout_of_its_own_section(kwargs):
    section = ACTOR + "mindspeed."
    run = config(
        "verl", *GRPO, "model_engine=mindspeed", section + "strategy=mindspeed_megatron", section + "tensor_model_parallel_size=2",
        section + "pipeline_model_parallel_size=2", section + "context_parallel_size=2", section + "optimizer_offload=True",
        section + "use_mbridge=True", f"{section}{kwargs}.seq_length=4096", f"{section}{kwargs}.spec=[a.b, layer_spec]",
        f"{section}{kwargs}.recompute_granularity=full", f"{section}{kwargs}.recompute_method=uniform",
        f"{section}{kwargs}.recompute_num_layers=1", f"{section}{kwargs}.moe_aux_loss_coeff=0.01",
        "actor_rollout_ref.ref.mindspeed.tensor_model_parallel_size=2", ACTOR + "use_dynamic_bsz=True",
        ACTOR + "ppo_max_token_len_per_gpu=4096",
    )  # fmt: skip
    layout = run.layout
    assert (layout.dp, layout.tp, layout.pp, layout.cp) == (1, 2, 2, 2)
    # A budget of a GPU, times the two that share a sequence.
    assert run.policy.tokens_per_micro_batch == 8192
    assert run.policy.recompute == "full" and run.policy.offload.optimizer and run.policy.sequence_parallel
    assert run.policy.megatron.transformer == {"moe_aux_loss_coeff": 0.01}


def test_mindspeeds_fsdp_is_data_parallel():
    run = config(
        "verl", *GRPO, "model_engine=mindspeed", ACTOR + "mindspeed.strategy=mindspeed_fsdp",
        ACTOR + "mindspeed.tensor_model_parallel_size=4",
    )  # fmt: skip
    assert (run.layout.dp, run.layout.tp) == (8, 1)


@pytest.mark.parametrize(("manager", "buffer"), [("dapo", 512), ("naive", 0), ("prime", 0), ("batch", 0)])
@pytest.mark.parametrize(
    "start",
    ["reward_model.overlong_buffer", "custom_reward_function.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg"],
)
def test_only_the_manager_that_reads_it_takes_a_penalty_off_long_responses(manager, buffer, start):
    penalty = [f"{start}.{key}" for key in ("enable=True", "len=512", "penalty_factor=1.0")]
    run = config("verl", *GRPO, "data.max_response_length=2048", f"reward_model.reward_manager={manager}", *penalty)
    assert run.algorithm.resolved.overlong_buffer == buffer


@pytest.mark.parametrize(
    ("words", "top_k"), [(["do_sample=True", "temperature=0.6", "top_k=20"], 20), (["do_sample=True", "temperature=1"], 0)]
)
def test_an_evaluation_draws_from_as_many_tokens_as_it_says(words, top_k):
    run = config(
        "verl", *GRPO, "data.val_files=v.parquet", *(f"actor_rollout_ref.rollout.val_kwargs.{word}" for word in words)
    )
    assert (run.eval.samples, run.eval.top_k) == (1, top_k)


@pytest.mark.parametrize("word", [
    "actor@actor_rollout_ref.actor=mlite_actor", ACTOR + "use_token_level_loss=False", "trainer.checkpoint_callback_class=a.B",
])  # fmt: skip
def test_what_other_code_does_is_refused_by_name(word):
    translation = translated("verl", *GRPO, word)
    assert [(outcome.key, outcome.kind) for outcome in translation.outcomes if outcome.is_refused] == [
        (word.partition("=")[0], "unsupported")
    ]


@pytest.mark.parametrize("word", [
    ACTOR + "use_token_level_loss=True", ACTOR + "fsdp_config.turbo_config.memory.recompute=True",
    ACTOR + "fsdp_config.full_determinism=False",
])  # fmt: skip
def test_a_key_that_asks_for_nothing_changes_nothing(word):
    assert config("verl", *GRPO, word) == config("verl", *GRPO)


@pytest.mark.parametrize(("program", "buffer"), [("verl.trainer.main_ppo", 0), ("recipe.dapo.main_dapo", 512)])
def test_a_manager_that_is_not_named_is_the_programs_own(program, buffer):
    penalty = [f"reward_model.overlong_buffer.{key}" for key in ("enable=True", "len=512", "penalty_factor=1.0")]
    run = config("verl", *GRPO, "data.max_response_length=2048", f"-m={program}", *penalty)
    assert run.algorithm.resolved.overlong_buffer == buffer


def test_the_release_of_the_defaults_is_named_above_the_configuration_and_in_a_run():
    older = translated("verl", *GRPO, "actor_rollout_ref.actor.fsdp_config.grad_offload=false")
    assert (older.release, translated("verl", *GRPO).release) == ("2025-02", "")
    assert "with the defaults of its release 2025-02" in writer.write(older, "verl").splitlines()[0]
    assert writer.summary(older).endswith("defaults of release 2025-02")
    assert "release" not in writer.write(translated("verl", *GRPO), "verl").splitlines()[0]
