"""The rows of verl's table for the run: its length, checkpoints, what it shows, and how it is started."""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.shared import SHOWN, WHOLE_STATE
from fivefold.config.dialects.table import Section, below, fixed, lacks, to, used
from fivefold.config.dialects.verl_rows_rollout import STORE

TRAINER = Section.of(
    "Trainer",
    used(
        "trainer.total_epochs trainer.total_training_steps",
        "trainer.epochs trainer.steps trainer.ends_with_data policy.optimizer.decay_steps policy.optimizer.warmup_steps",
        "What is shorter ends the run; schedules go over total_training_steps where it is set.",
    ),
    to("trainer.save_freq", "trainer.save_every", shared.interval, "Here the end of the run is always saved."),
    used("trainer.test_freq", "trainer.eval_every"),
    to("trainer.val_before_train", "trainer.eval_before_train", shared.flag),
    lacks("trainer.val_only", "evaluation without training: `fivefold eval`", [False]),
    used("trainer.resume_mode trainer.resume_from_path", "trainer.resume"),
    used("trainer.max_actor_ckpt_to_keep", "trainer.keep", "All of them when left out."),
    to("trainer.default_local_dir", "trainer.run_dir", shared.path),
    to(
        "trainer.logger",
        "trainer.loggers",
        shared.loggers,
        "metrics.jsonl is always written; a tracker of the default has to be said.",
    ),
    used("trainer.project_name trainer.experiment_name", "trainer.run_dir tracking.project tracking.name"),
    to(
        "trainer.device",
        "trainer.device",
        shared.choice({"cuda": "cuda", "npu": "auto", "gpu": "cuda", "cpu": "cpu", "xpu": "auto"}, "a device"),
        "npu: what there is.",
    ),
    to("trainer.seed", "trainer.seed", shared.whole),
    fixed("trainer.max_critic_ckpt_to_keep trainer.max_ckpt_to_keep", "policy and critic are in one checkpoint"),
    fixed("trainer.balance_batch", "tokens are always balanced over replicas: the numbers are the same"),
    fixed("**.checkpoint.contents **.checkpoint.**", WHOLE_STATE),
    fixed(
        (
            "trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir "
            "trainer.episode_log_dir trainer.log_episodes"
        ),
        "samples of each step are in samples.jsonl",
    ),
    fixed(
        (
            "trainer.default_hdfs_dir trainer.del_local_ckpt_after_load "
            "trainer.remove_previous_ckpt_in_save trainer.esi_redundant_time "
            "trainer.ray_wait_register_center_timeout trainer.use_legacy_worker_impl trainer.use_v1 "
            "trainer.nccl_timeout"
        ),
        "how the run is started and saved",
    ),
    used(
        "trainer.v1.trainer_mode trainer.v1.colocate_async.num_warmup_batches "
        "trainer.v1.separate_async.num_warmup_batches trainer.v1.separate_async.hybrid_rollout.enable_switch",
        "rollout engine.mode engine.sleep engine.placement",
        "num_warmup_batches is rollout.max_staleness, with interrupt: continue and tail: carry. verl drops what spans "
        "more than sampler.max_off_policy_threshold versions; here nothing gets older than num_warmup_batches. "
        "colocate_async stops its engines while the policy trains; servers on the policy's GPUs go on sampling here "
        "(engine.sleep: false), for which there must be memory.",
    ),
    used(
        "trainer.v1.separate_async.parameter_sync_step",
        "algorithm.updates_per_step",
        "train_batch_size / ppo_mini_batch_size.",
    ),
    lacks("trainer.v1.sampler.custom_sampler.path", "a sampler of one's own"),
    lacks("trainer.v1.sampler.sync_refill_failed_groups", "other prompts in the place of those that fail", [False]),
    fixed(
        "trainer.v1.sampler.max_off_policy_strategy trainer.v1.sampler.max_off_policy_threshold",
        "num_warmup_batches bounds how old samples get",
    ),
    fixed(
        "trainer.v1.sampler.custom_sampler.name trainer.v1.sampler.sampler_kwargs trainer.v1.sampler.sampler_kwargs.**",
        "read with custom_sampler.path only",
    ),
    fixed("trainer.v1.separate_async.hybrid_rollout.*", "read with hybrid_rollout.enable_switch only"),
    fixed(below("trainer.v1.", "colocate_async sampler sampler.custom_sampler separate_async sync sync.**"), "empty"),
    fixed("trainer.v1.separate_async.hybrid_rollout", "empty"),
    used(
        "global_profiler.tool global_profiler.steps actor_rollout_ref.*.profiler.enable",
        "trainer.profile.steps",
        "The torch profiler's steps.",
    ),
    fixed(
        "**.profiler.tool_config.torch.step_start **.profiler.tool_config.torch.step_end "
        "global_profiler.global_tool_config.npu.discrete global_profiler.global_tool_config.npu.contents "
        "global_profiler.global_tool_config.npu.level "
        "global_profiler.global_tool_config.npu.analysis **.profiler.** global_profiler.** profiler.* "
        "trainer.profile_* trainer.npu_profile.**",
        SHOWN,
    ),
    fixed(
        "ray_kwargs.** ray_init.** hydra.** hydra --config-path",
        "how processes are started",
        takes_any=True,
    ),
    fixed("transfer_queue.enable transfer_queue.num_* transfer_queue.**", STORE),
    lacks("distillation.enabled", "learning from a teacher", [False]),
    fixed("distillation.**", "read with distillation.enabled only"),
    lacks(
        below("skip.", "rollout.enable rollout_tq.enable async_rollout.enable"),
        "responses that are read from files",
        [False],
    ),
    fixed("skip.**", "read with enable only"),
    lacks("rllm.** rllm/*", "rLLM's agents"),
    used(
        "-m",
        "algorithm.name rollout engine.placement",
        "main_ppo, DAPO's main_dapo, fully_async_policy. one_step_off_policy is rollout.max_staleness: 1 with "
        "interrupt: finish: a step's prompts are sampled by the weights before the last update, whole "
        "(ray_trainer.py:509). Under recipe (until 2025-11) it computes old log-probs when bypass_mode is left out, "
        "under verl.experimental they are the engine's. rLLM's main_ppo_async is the same with enable_log_prob for "
        "bypass_mode; partial_rollout is rollout.max_staleness: 1 with interrupt: continue and tail: carry; "
        "reward_queue is fully_async_policy. entropy has a reward function of its own, recipe/entropy/reward_score, "
        "which is read from there.",
    ),
)
