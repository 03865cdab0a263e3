"""Keys of verl's forks, recipes and engines of others, refused by name: what they do only their own code says."""

from __future__ import annotations

from fivefold.config.dialects.shared import SHOWN
from fivefold.config.dialects.table import Section, fixed, lacks

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_LOSS = "the loss of a fork (DisCO, DRPO and their kin)"
_OFF_POLICY = "responses of others mixed into the policy's (LUFFY)"

SECTION = Section.of(
    "Forks and other engines",
    lacks("*@**", "another file of Hydra's than the program's: say what it sets"),
    lacks(
        f"{_A}engine.** critic.engine.** engine.impl_cfg.**", "Megatron-LM's experimental lite: its defaults are not verl's"
    ),
    lacks(
        f"{_A}deepspeed_config.** {_A}deepspeed.** critic.deepspeed_config.** {_A}zero_stage",
        "DeepSpeed's engine of a fork: say actor.strategy=fsdp",
    ),
    lacks(f"{_A}grpo_type {_A}loss_type {_A}ppo_kl_type {_A}delta {_A}tau {_A}tau2 {_A}beta {_A}Lambda", _LOSS),
    fixed(f"{_A}use_max_seq_len", "read by the losses of a fork only"),
    lacks(f"{_A}k_percent {_A}loss_factor", "of the recipe entropy's first form: say actor.policy_loss"),
    lacks(f"{_A}use_off_policy_loss {_A}use_sft_prefix_reward", _OFF_POLICY, [False]),
    fixed(
        f"{_R}max_prefix_len {_R}n_prefix {_R}*_prefix_ratio {_R}prefix_*",
        "read with use_off_policy_loss only",
        takes_any=True,
    ),
    lacks(f"{_A}loss_remove_token_mean {_A}loss_remove_clip trainer.remove_clip", "a loss without clip or mean", [False]),
    lacks("algorithm.grpo_use_std", "a fork's name of algorithm.norm_adv_by_std_in_grpo", [True]),
    lacks(
        _A + "use_token_level_loss",
        "the mean of each response first, as DAPO's recipe had it in 2025-03: say loss_agg_mode=seq-mean-token-mean",
        [True],
    ),
    lacks(_A + "adaptive_entropy.enabled", "an entropy bonus that moves (Skywork)", [False]),
    fixed(_A + "adaptive_entropy.*", "read with adaptive_entropy.enabled only", takes_any=True),
    lacks(
        "trainer.rejection_sample", "batches that shrink by the groups of one reward: say algorithm.filter_groups", [False]
    ),
    fixed("trainer.rejection_sample_multiplier", "read with rejection_sample only"),
    lacks(_R + "do_vote", "rewards by what most responses say (TTRL)", [False]),
    fixed(_R + "n_vote", "read with do_vote only"),
    lacks(_R + "enable_tools", "tools and several turns", [False]),
    fixed(
        "actor_rollout_ref.ref.enable actor_rollout_ref.ref.include_ref actor_rollout_ref.ref.use_ref",
        "a reference is there where a KL asks for one",
    ),
    fixed(f"{_A}veomni.data_parallel_size", "data parallelism is what the other sizes leave"),
    fixed(
        "trainer.wandb_run_id trainer.debug trainer.debug_port trainer.stats_path trainer.stats_save_freq "
        "trainer.wandb_kwargs.* trainer.eval_outputs_dir",
        SHOWN,
        takes_any=True,
    ),
    lacks("algorithm.gdpo_reward_keys", "advantages of each part of a reward (GDPO)"),
    lacks(
        "azr.** reward_fn.** amo_strategy.** tasksampler.** lean.** hinter.** atropos.** reward_config.** "
        "algorithm.reflection.**",
        "a program of a fork's own",
    ),
)
