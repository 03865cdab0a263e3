"""The rows of verl's table for what its keys say of the method: advantage, loss, KL, corrections, which groups are kept."""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.table import Section, fixed, lacks, to, used

_A = "actor_rollout_ref.actor."

ALGORITHM = Section.of(
    "Algorithm",
    used(
        "algorithm.adv_estimator",
        "algorithm.name algorithm.advantage algorithm.credit algorithm.token_baseline",
        "gae when left out. gpg: verl scales by the samples with a reward that is not 0 "
        "(core_algos.py:657), the paper by groups with variance. optimal_token_baseline is as in verl 1dda039b "
        "(2026-11): where one response of a group is the longest there is no baseline; before (2026-01) it was the "
        "response's own return there.",
    ),
    used("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize", "Unbiased deviation, ε 1e-6, as here."),
    used(
        "algorithm.gamma algorithm.lam",
        "algorithm.gamma algorithm.lam",
        "Read by gae and reinforce_plus_plus.",
    ),
    used(
        (
            f"algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.* {_A}use_kl_loss "
            f"{_A}kl_loss_coef {_A}kl_loss_type"
        ),
        "algorithm.kl",
        "Off unless one of the two is set; both are two penalties. low_var_kl is k3, mse is k2. verl keeps k3 within "
        "±10, which is reached where log π differs by more than 2.5.",
    ),
    used(
        _A + "policy_loss.loss_mode",
        "algorithm.surrogate algorithm.importance_sampling_level",
        "gspo is `sequence-token`, with the gradient of each token. gspo, sapo and geo_mean take the "
        "mean over sequences "
        "whatever loss_agg_mode says (core_algos.py:1311, 1394, 1707).",
    ),
    used(
        _A + "policy_loss.*",
        "algorithm.cov_fraction algorithm.cov_low algorithm.cov_high algorithm.cov_kl_coef",
    ),
    used(
        f"{_A}policy_loss.tau_pos {_A}policy_loss.tau_neg",
        "algorithm.temperature_positive algorithm.temperature_negative",
        "Read nowhere in verl: accepted where actor.tau_pos and actor.tau_neg say the same.",
    ),
    used(
        f"{_A}clip_ratio {_A}clip_ratio_low {_A}clip_ratio_high",
        "algorithm.clip_low algorithm.clip_high",
        "clip_ratio alone changes nothing while clip_ratio_low and _high have their defaults of 0.2. A clip_ratio_low "
        "above 1 bounds nothing, as 1 does here.",
    ),
    used(_A + "clip_ratio_c", "algorithm.dual_clip", "Of the vanilla loss; 3.0 when left out: verl always clips twice."),
    used(f"{_A}tau_pos {_A}tau_neg", "algorithm.temperature_positive algorithm.temperature_negative"),
    used(
        _A + "loss_agg_mode",
        "algorithm.aggregate algorithm.penalty_aggregate",
        "token-mean counts the tokens of the whole update on all GPUs, as verl's engine does; its older actor took the "
        "mean of each micro-batch (`micro-batch-token-mean`). seq-mean-token-sum-norm divides by the padded width and "
        "not by the number of samples (core_algos.py:1072), constant-length by both: a factor that AdamW does not see "
        "but gradient clipping does.",
    ),
    lacks(_A + "loss_scale_factor", "another constant than data.max_response_length"),
    to(_A + "entropy_coeff", "algorithm.entropy_coef", shared.number),
    used(
        (
            f"{_A}tis_imp_ratio_cap algorithm.rollout_correction.bypass_mode "
            "algorithm.rollout_correction.loss_type algorithm.rollout_correction.rollout_is "
            "algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_correction.rollout_rs "
            "algorithm.rollout_correction.rollout_rs_threshold"
        ),
        (
            "algorithm.rollout_correction.weight algorithm.rollout_correction.reject "
            "algorithm.rollout_correction.reject_divergence algorithm.surrogate "
            "algorithm.rollout_correction.old_logprobs_from"
        ),
        "verl compares -log(trainer / engine) with the bounds of k1 (rollout_corr_helper.py), so bounds l and u of "
        "its ratio are 1/u and 1/l of ours. What is rejected leaves verl's denominators and stays in ours.",
    ),
    lacks("algorithm.rollout_correction.rollout_is_batch_normalize", "weights of mean 1 in each batch", [False]),
    fixed("algorithm.rollout_correction.use_policy_gradient", "an older name of loss_type: False is ppo_clip"),
    lacks(
        f"{_A}rollout_correction.*",
        "verl copies algorithm.rollout_correction there: write that",
        ["disabled", False],
    ),
    used(
        ("algorithm.filter_groups.enable algorithm.filter_groups.metric algorithm.filter_groups.max_num_gen_batches"),
        "algorithm.dynamic_sampling algorithm.dynamic_sampling_by algorithm.sampling_rounds",
        "Groups whose responses all have the same reward. The run ends with the data of total_epochs, of which each round "
        "takes gen_batch_size (trainer.ends_with_data); with trainer.use_v1 it counts updates. After the last round verl "
        "ends the run, here what is missing is filled up with such groups.",
    ),
    fixed("algorithm.filter_groups.max_inflight_gen_batches", "rounds follow each other: the same groups are kept"),
    used(
        "data.gen_batch_size",
        "algorithm.prompts_per_round data.prompts_per_step",
        "Prompts of a round of dynamic sampling; without it the batch of a step (ray_trainer.py of 0.4 to 0.8), not with "
        "trainer.use_v1.",
    ),
    lacks("algorithm.use_pf_ppo", "samples drawn again by their reward", [False]),
    fixed("algorithm.pf_ppo.*", "read with use_pf_ppo only"),
    used(
        "algorithm.mask_truncated_samples algorithm.clip_advantages",
        "algorithm.overlong_zero algorithm.advantage_clip",
        "Of rLLM's verl: GRPO's advantage of a response of the longest length is 0 where its reward is 0; advantages "
        "are kept within ±1.",
    ),
    used(
        f"algorithm.sppo_eta {_A}sppo_eta",
        "algorithm.baseline_temperature algorithm.eta",
        "Of the recipe sppo: 1 / the temperature of the log mean exp that rewards are compared with, and what the "
        "squared distance multiplies them with.",
    ),
)
