"""What scripts of SkyRL's and siiRL's older releases and of their examples become here, by hand."""

from __future__ import annotations

import pytest

from fivefold.config import RunConfig
from tests.support.dialects import HOME, config, translate_words, translated

SKYRL = [
    "data.train_data=['/d/a.parquet']", "trainer.policy.model.path=m", "trainer.placement.policy_num_gpus_per_node=4",
    "generator.inference_engine.num_engines=4", "trainer.logger=console", "trainer.algorithm.use_kl_loss=false",
]  # fmt: skip
OLDER_SKYRL = [word.replace("inference_engine.num_engines", "num_inference_engines") for word in SKYRL]
SIIRL = [
    "data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8", "data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=256",
]  # fmt: skip


@pytest.mark.parametrize(("words", "mean"), [
    (SKYRL, "token-mean"),
    ([*SKYRL, "-m=skyrl.train.entrypoints.main_base", "trainer.micro_train_batch_size_per_gpu=1"], "token-mean"),
    # A key, or a program, that ended with skyrl-train.
    ([*OLDER_SKYRL, "trainer.micro_train_batch_size_per_gpu=8"], "micro-batch-token-mean"),
    ([*SKYRL, "-m=skyrl_train.entrypoints.main_base", "trainer.micro_train_batch_size_per_gpu=8"], "micro-batch-token-mean"),
    # A micro-batch of one sequence: the mean of the sequence, then over sequences.
    ([*OLDER_SKYRL, "trainer.micro_train_batch_size_per_gpu=1"], "seq-mean-token-mean"),
    ([*SKYRL, "trainer.algorithm.loss_reduction=token_mean_legacy", "trainer.micro_train_batch_size_per_gpu=1"], "seq-mean-token-mean"),
    ([*SKYRL, "trainer.algorithm.loss_reduction=token_mean_legacy", "trainer.micro_train_batch_size_per_gpu=2"], "micro-batch-token-mean"),
    ([*OLDER_SKYRL, "trainer.algorithm.loss_reduction=sequence_mean"], "seq-mean-token-mean"),
])  # fmt: skip
def test_skyrls_token_mean_is_that_of_its_release(words, mean):
    assert config("skyrl", *words).algorithm.resolved.aggregate == mean


def test_skyrls_token_mean_next_to_a_kl_of_sequences_is_that_of_the_update():
    """The mean of micro-batches is for all of a loss here; with one sequence each both are means over sequences."""
    kl = [*OLDER_SKYRL[:-1], "trainer.algorithm.use_kl_loss=true"]
    several = config("skyrl", *kl, "trainer.micro_train_batch_size_per_gpu=4").algorithm.resolved
    assert (several.aggregate, several.penalty_aggregate) == ("token-mean", "seq-mean-token-mean")
    one = config("skyrl", *kl, "trainer.micro_train_batch_size_per_gpu=1").algorithm.resolved
    assert (one.aggregate, one.penalty_aggregate or one.aggregate) == ("seq-mean-token-mean",) * 2
    versioned = translate_words("skyrl@2026-03", [*SKYRL, "trainer.micro_train_batch_size_per_gpu=1"], HOME)
    assert versioned.tree["algorithm"]["aggregate"] == "seq-mean-token-mean"


@pytest.mark.parametrize(("words", "scale"), [
    (["trainer.algorithm.max_seq_len=1536"], 1.5),
    (["trainer.algorithm.max_seq_len=1024"], 1.0),
    # Left out: 512 of the prompt and 1024 of the response.
    ([], 1.5),
    (["generator.max_input_length=1024"], 2.0),
])  # fmt: skip
def test_another_constant_of_skyrls_loss_is_in_what_stands_next_to_it(words, scale):
    """PG / 1536 + 0.01 KL, clipped at 1, is two thirds of PG / 1024 + 0.015 KL, clipped at 1.5."""
    base = ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "trainer.max_prompt_length=512"]
    kl = ["trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0.01"]
    run = config("skyrl", *SKYRL, *kl, *base, "generator.sampling_params.max_generate_length=1024", *words)
    chosen = run.algorithm.resolved
    assert (chosen.aggregate, chosen.penalty_aggregate) == ("constant-length", "seq-mean-token-mean")
    assert (chosen.kl.coef, run.policy.optimizer.clip_grad) == (pytest.approx(0.01 * scale), pytest.approx(scale))
    other = config("skyrl", *SKYRL, *kl, "trainer.algorithm.max_seq_len=4096")
    assert (other.algorithm.resolved.kl.coef, other.policy.optimizer.clip_grad) == (0.01, 1.0)


def test_skyrls_limit_of_later_turns_says_nothing_of_one_turn():
    translation = translated("skyrl", *SKYRL, "generator.max_input_length=512", "trainer.max_prompt_length=1024")
    assert any("less than trainer.max_prompt_length = 1024" in refusal for refusal in translation.refusals)


@pytest.mark.parametrize(("program", "quantization"), [("main_dapo_flashrl", "fp8"), ("main_dapo", None)])
def test_the_engines_of_flashrl_quantize_and_its_program_is_dapos(program, quantization):
    """1024 tokens at most, of which the last 512 are penalized; weights of tokens up to 2."""
    run = config(
        "skyrl", *SKYRL, f"-m=examples.train.flash_rl.{program}", "trainer.algorithm.overlong_buffer_len=512",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token", "trainer.algorithm.policy_loss_type=dual_clip",
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0",
    )  # fmt: skip
    assert run.engine.own_arguments.get("quantization") == quantization
    chosen = run.algorithm.resolved
    assert (chosen.overlong_buffer, chosen.overlong_penalty, chosen.dual_clip) == (512, 1.0, 3.0)
    assert (chosen.rollout_correction.weight, chosen.rollout_correction.high) == ("token", 2.0)


def test_functions_that_skyrls_examples_register_are_there_under_their_programs_only():
    baseline, loss = "trainer.algorithm.advantage_estimator=simple_baseline", "trainer.algorithm.policy_loss_type=reinforce"
    chosen = config("skyrl", *SKYRL, "-m=x.main_custom_adv_est", baseline).algorithm.resolved
    assert (chosen.advantage, chosen.normalize, chosen.surrogate) == ("step_mean", "none", "ppo_clip")
    chosen = config("skyrl", *OLDER_SKYRL, "-m=x.main_custom_policy_loss", loss).algorithm.resolved
    assert (chosen.surrogate, chosen.aggregate) == ("log_likelihood", "constant-length")
    for words, says in (
        ([*SKYRL, baseline], "in the program main_custom_adv_est only, not in main_base"),
        ([*OLDER_SKYRL, "-m=x.main_custom_adv_est", loss], "SkyRL registers it in the program main_custom_policy_loss only"),
        ([*SKYRL, "-m=x.main_custom_policy_loss", loss], "that loss_reduction has divided; --from skyrl@2026-03"),
    ):
        assert any(says in refusal for refusal in translated("skyrl", *words).refusals), words


def test_skyrls_megatron_settings_next_to_trainer_are_the_policys():
    """As 2025-09 had them: 8 ranks of t2·p2, twice; the last of two stages has 13 layers."""
    words = [word.replace("gpus_per_node=4", "gpus_per_node=8").replace("engines=4", "engines=8") for word in OLDER_SKYRL]
    sizes = ["megatron_config.policy.tensor_model_parallel_size=2", "megatron_config.ref.tensor_model_parallel_size=2"]
    last = "megatron_config.policy.transformer_config_kwargs.num_layers_in_last_pipeline_stage=13"
    run = config(
        "skyrl", *words, "trainer.strategy=megatron", *sizes, "megatron_config.policy.pipeline_model_parallel_size=2", last
    )
    assert str(run.layout) == "megatron:d2t2p2"
    assert run.policy.megatron.pipeline["num_layers_in_last_pipeline_stage"] == 13
    one = translated("skyrl", *words, "trainer.strategy=megatron", *sizes, last)
    assert one.refusals == [] and "pipeline" not in one.tree["policy"].get("megatron", {})
    assert any("one stage" in outcome.reason for outcome in one.outcomes)


def test_names_of_a_month_of_skyrls_correction_are_those_of_today():
    start = "trainer.algorithm.rollout_correction."
    run = config("skyrl", *OLDER_SKYRL, f"{start}tis_ratio_type=token", f"{start}token_tis_ratio_cap_high=3.0")
    assert (run.algorithm.resolved.rollout_correction.weight, run.algorithm.resolved.rollout_correction.high) == (
        "token",
        3.0,
    )
    masked = translated("skyrl", *OLDER_SKYRL, f"{start}rejection_mask_type=geometric")
    assert any("masks of outlying tokens" in refusal for refusal in masked.refusals)


def test_slices_of_skyrls_sft_are_read_without_quotes():
    words = ["-m=skyrl.train.main_sft", "model.path=m", "max_length=1024", "train_datasets=[o/a]", "num_steps=3"]
    translation = translated(
        "skyrl", *words, "train_dataset_splits=[train[:50]]", "eval_datasets=[o/a]", "eval_dataset_splits=[train[-5:]]"
    )
    assert translation.refusals == []
    assert translation.tree["data"]["train"] == ["o/a-train.parquet[:50]"]
    assert translation.tree["data"]["val"] == ["o/a-train.parquet[-5:]"]
    quoted = translated("skyrl", *words, "train_dataset_splits=['train[:50]']")
    assert quoted.tree["data"]["train"] == ["o/a-train.parquet[:50]"]


def test_cpgd_of_siirl_is_the_one_of_its_program():
    """512 prompts of 8 in two updates; log-probs clipped at log 0.8 and log 1.2, the pull 0.001."""
    asked = [
        "algorithm.adv_estimator=cpgd",
        "actor_rollout_ref.actor.policy_drift_coeff=0.001",
        "algorithm.weight_factor_in_cpgd='STD_weight'",
    ]
    run = config("siirl", *SIIRL, *asked)
    chosen = run.algorithm.resolved
    assert (chosen.surrogate, chosen.clip_low, chosen.clip_high, chosen.drift_coef) == ("cpgd", 0.2, 0.2, 0.001)
    assert (chosen.advantage, chosen.normalize, chosen.aggregate) == ("group", "group", "token-mean")
    assert (run.data.prompts_per_step, run.algorithm.group_size, run.algorithm.updates_per_step) == (512, 8, 2)
    naive = RunConfig.of(translated("siirl", *SIIRL, *asked[:2], "algorithm.weight_factor_in_cpgd=naive").tree)
    assert naive.algorithm.resolved.normalize == "none"
    # With GRPO's advantages the loss is asked for by itself: whose program it is says what it means.
    by_itself = [*SIIRL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_cpgd_loss=True", asked[1]]
    older = config("siirl", "-m=siirl.client.main_dag", *by_itself).algorithm.resolved
    assert (older.surrogate, older.drift_coef, older.advantage) == ("cpgd", 0.001, "group")
    for words, says in (
        (["-m=siirl.main_dag", *by_itself], "PPO's clip with CPGD's drift"),
        (
            [*SIIRL, *asked[:2], "algorithm.weight_factor_in_cpgd=clip_filter_like_weight"],
            "the weight clip_filter_like_weight",
        ),
        ([*SIIRL, *asked, "actor_rollout_ref.actor.strategy=megatron"], "siiRL's Megatron actor lacks"),
    ):
        assert any(says in refusal for refusal in translated("siirl", *words).refusals), words
    # Without the key that asks for it the coefficient is read by nothing.
    assert config("siirl", *SIIRL, "algorithm.adv_estimator=grpo", asked[1]).algorithm.resolved.surrogate == "ppo_clip"
