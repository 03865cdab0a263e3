"""The rows of Trinity-RFT's table for its trainer: its own keys, and verl's for the models that it trains.

Since 2025-11 Trinity writes its own keys over verl's of the same meaning (verl_config.py, synchronize_config); every other
key of verl's acts as it does there.
"""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.shared import SHOWN
from fivefold.config.dialects.table import Section, below, fixed, lacks, slower, used
from fivefold.config.dialects.trinity_keys import ACTOR, CRITIC, MODEL, REFERENCE, VERL

_MODELS = f"{ACTOR} {REFERENCE} {CRITIC}"
_MCORE = below(_MODELS, "megatron.")
_FSDP = (ACTOR + "fsdp_config.", REFERENCE + "fsdp_config.", CRITIC + "model.fsdp_config.")
_SIZES = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size"
)
_OVERWRITTEN = "Trinity writes it from a key of its own (verl_config.py)"
_ANY_CUT = "no cut into micro-batches changes the numbers"
_NEVER_STARTED = "verl's own data, reward model and sampler, which Trinity never starts"
_REWARD_MODEL = (
    "enable forward_max_token_len_per_gpu max_length micro_batch_size_per_gpu model reward_manager strategy "
    "ulysses_sequence_parallel_size use_dynamic_bsz use_reward_loop model.external_lib model.fsdp_config "
    "model.input_tokenizer model.path model.use_remove_padding model.fsdp_config.wrap_policy"
)

TRAINER = Section.of(
    "Trainer",
    used("trainer.save_interval", "trainer.save_every"),
    used(
        f"trainer.grad_clip trainer.actor_grad_clip {ACTOR}grad_clip {ACTOR}optim.clip_grad algorithm.optimizer.clip_grad",
        "policy.optimizer.clip_grad",
        "With FSDP trainer.grad_clip, unless verl's grad_clip is set; with Megatron algorithm.optimizer.clip_grad.",
    ),
    used(
        "trainer.use_dynamic_bsz trainer.max_token_len_per_gpu "
        + f"{ACTOR}use_dynamic_bsz {ACTOR}ppo_max_token_len_per_gpu {ACTOR}ppo_micro_batch_size_per_gpu",
        "policy.tokens_per_micro_batch",
    ),
    used(f"trainer.ulysses_sequence_parallel_size {ACTOR}ulysses_sequence_parallel_size", "policy.backend"),
    used(
        f"trainer.trainer_strategy {ACTOR}strategy",
        "policy.backend",
        "fsdp becomes data-parallel Megatron-Core on as many GPUs.",
    ),
    used(below(ACTOR + "megatron.", _SIZES), "policy.backend"),
    used(
        below((REFERENCE + "megatron.", CRITIC + "megatron."), _SIZES),
        "reference.backend critic.backend",
        "Layouts of their own on the policy's ranks.",
    ),
    used(
        below(_MCORE, "virtual_pipeline_model_parallel_size"),
        "policy.megatron.pipeline reference.megatron.pipeline critic.megatron.pipeline",
    ),
    used(f"{ACTOR}megatron.sequence_parallel", "policy.sequence_parallel"),
    fixed(
        below((REFERENCE + "megatron.", CRITIC + "megatron."), "sequence_parallel"),
        "the policy's key says it for all models: it changes no number",
    ),
    used(
        below(_MCORE, "override_transformer_config.*"),
        "policy.recompute policy.megatron.transformer policy.megatron.pipeline critic.recompute critic.megatron "
        "reference.megatron",
        "The critic's and the reference's are theirs alone, where they differ from the policy's.",
        takes_any=True,
    ),
    used(
        below(_MCORE, "override_ddp_config.*"),
        "policy.megatron.ddp critic.megatron.ddp",
        "The reference computes no gradients.",
        takes_any=True,
    ),
    fixed(below(_MCORE, "override_transformer_config override_ddp_config"), "empty"),
    lacks(
        below(_MCORE, "override_mcore_model_config") + below(_MCORE, "override_mcore_model_config.**"),
        "changes of the model's shape: write them into its config.json",
    ),
    used(
        (
            *below((ACTOR + "megatron.", CRITIC + "megatron."), "param_offload grad_offload optimizer_offload"),
            *below((ACTOR + "fsdp_config.", CRITIC + "model.fsdp_config."), "param_offload grad_offload optimizer_offload"),
            *below((REFERENCE + "megatron.", REFERENCE + "fsdp_config."), "param_offload"),
        ),
        "policy.offload critic.offload",
        "The reference's weights leave the GPU with the policy's.",
    ),
    fixed(
        below((REFERENCE + "megatron.", REFERENCE + "fsdp_config."), "grad_offload optimizer_offload"),
        "the reference has no gradients and no optimizer",
    ),
    used(
        below(_MCORE, "use_dist_checkpointing dist_checkpointing_path"),
        "model.path model.config reference.path critic.path",
        "Weights of a checkpoint of Megatron-Core; config.json and tokenizer stay those of the Hugging Face directory.",
    ),
    fixed(
        below(
            _MCORE,
            "use_mbridge vanilla_mbridge dist_checkpointing_prefix use_distributed_optimizer seed strategy forward_only "
            "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient",
        ),
        "our own tables read weights, under any prefix; the optimizer is distributed; a checkpoint fits every layout",
    ),
    lacks(below(_MCORE, "full_determinism"), "runs whose bits are the same: trainer.deterministic", [False]),
    fixed(
        below(
            _MCORE,
            "infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu max_token_len_per_gpu micro_batch_size_per_gpu "
            "use_dynamic_bsz use_remove_padding",
        ),
        _ANY_CUT,
    ),
    fixed(below(_MCORE, "use_fused_kernels"), shared.KERNELS),
    used(
        (ACTOR + "megatron.dtype", ACTOR + "fsdp_config.dtype"),
        "policy.dtype",
        "The reference and the critic have the policy's type.",
    ),
    lacks(
        (
            *below((REFERENCE + "megatron.", CRITIC + "megatron."), "dtype"),
            *below((REFERENCE + "fsdp_config.", CRITIC + "model.fsdp_config."), "dtype"),
        ),
        "another type of numbers than the policy's",
        ["bfloat16", "bf16"],
    ),
    fixed(
        below(_FSDP, "model_dtype"),
        "parameters in bfloat16 with a float32 copy in the optimizer, gradients summed in float32",
    ),
    slower(below(_FSDP, "offload_policy"), "FSDP2's own offload: policy.offload moves state between stages", [False]),
    lacks(
        (*below(_FSDP, "mixed_precision.*"), *below(_FSDP, "mixed_precision")),
        "types of single parts of the computation",
        ["bf16", "bfloat16", "fp32", "float32"],
    ),
    fixed(
        below(_FSDP, "_target_ forward_prefetch fsdp_size reshard_after_forward wrap_policy wrap_policy.min_num_params"),
        "how FSDP shards: the sums are those of data-parallel Megatron-Core",
    ),
    used(
        f"{MODEL}enable_gradient_checkpointing {CRITIC}model.enable_gradient_checkpointing",
        "policy.recompute critic.recompute",
        "With FSDP, and true when left out.",
    ),
    lacks(
        below((MODEL, CRITIC + "model."), "override_config override_config.**"),
        "changes of config.json: write them into the model's directory",
    ),
    lacks(below((MODEL, CRITIC + "model."), "external_lib"), "a module of your own that is imported first"),
    slower(MODEL + "enable_activation_offload", "activations that wait on the host: policy.recompute", [False]),
    fixed(
        f"{MODEL}use_remove_padding {CRITIC}model.use_remove_padding {MODEL}use_shm",
        "sequences are always packed; where files are read from",
    ),
    fixed(f"{MODEL}use_fused_kernels {MODEL}fused_kernel_options {MODEL}fused_kernel_options.impl_backend", shared.KERNELS),
    lacks(
        below(MODEL + "mtp.", "enable enable_train enable_rollout"), "multi-token prediction: policy.mtp trains it", [False]
    ),
    fixed(
        (
            *below(
                MODEL + "mtp.",
                "detach_encoder method mtp_loss_scaling_factor num_speculative_tokens "
                "speculative_algorithm speculative_eagle_topk "
                "speculative_num_draft_tokens speculative_num_steps",
            ),
            MODEL + "mtp",
        ),
        "read with mtp.enable only",
    ),
    fixed(
        (
            *below(
                MODEL,
                "path custom_chat_template exclude_modules lora_adapter_path "
                "lora_alpha lora_rank target_modules rope_scaling "
                "rope_theta trust_remote_code",
            ),
            *below(CRITIC + "model.", "path tokenizer_path rope_scaling rope_theta trust_remote_code"),
            *below(ACTOR, "ppo_mini_batch_size optim.total_training_steps"),
            *below(CRITIC, "enable rollout_n nccl_timeout ray_namespace optim.total_training_steps"),
            *below(
                VERL + "actor_rollout_ref.",
                "explorer_name hybrid_engine nccl_timeout synchronizer synchronizer.explorer_world_size "
                "synchronizer.ray_namespace synchronizer.sync_interval synchronizer.sync_method synchronizer.sync_offset "
                "synchronizer.sync_style synchronizer.sync_timeout synchronizer.wait_for_checkpoint",
            ),
            *below(VERL + "synchronizer.", "explorer_world_size ray_namespace sync_interval sync_method sync_offset"),
            *below(VERL + "synchronizer.", "sync_style sync_timeout wait_for_checkpoint"),
            VERL + "synchronizer",
            *below(
                VERL + "trainer.",
                "default_local_dir experiment_name group_name n_gpus_per_node "
                "nnodes project_name resume_from_path resume_mode "
                "sync_freq total_epochs total_training_steps",
            ),
        ),
        _OVERWRITTEN,
    ),
    used(
        f"{ACTOR}ppo_epochs {CRITIC}ppo_epochs",
        "algorithm.ppo_epochs",
        "The critic learns in the policy's updates, so as often.",
    ),
    fixed(
        below(f"{ACTOR} {CRITIC}", "shuffle data_loader_seed"),
        "each of the trainer's steps is one update: the order in it changes nothing",
    ),
    fixed(
        (
            *below(ACTOR, "ppo_micro_batch_size use_prefix_grouper fix_actor_microbatch_loss_scale entropy_checkpointing"),
            *below(ACTOR, "entropy_from_logits_with_chunking calculate_sum_pi_squared sum_pi_squared_checkpointing"),
            *below(REFERENCE, "log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu"),
            *below(REFERENCE, "log_prob_use_dynamic_bsz use_prefix_grouper entropy_checkpointing"),
            *below(REFERENCE, "entropy_from_logits_with_chunking"),
            *below(CRITIC, "forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu"),
            *below(CRITIC, "ppo_micro_batch_size"),
        ),
        _ANY_CUT,
    ),
    fixed(
        below(f"{REFERENCE} {CRITIC}", "strategy ulysses_sequence_parallel_size"),
        "the actor's strategy is that of all models: it changes no number",
    ),
    lacks(below(_MODELS, "load_weight"), "models that begin with random weights", [True]),
    lacks(
        (*below(f"{ACTOR} {REFERENCE}", "router_replay.mode"), *below(_MCORE, "router_replay.mode")),
        "replaying the routing of experts: policy.router_replay",
        ["disabled"],
    ),
    fixed(
        (
            *below(f"{ACTOR} {REFERENCE}", "router_replay router_replay.record_file router_replay.replay_file"),
            *below(_MCORE, "router_replay router_replay.record_file router_replay.replay_file"),
        ),
        "read with its mode only",
    ),
    used(
        f"{ACTOR}optim.lr {CRITIC}optim.lr",
        "policy.optimizer.lr critic.optimizer.lr",
        "verl's keys of the policy are read where algorithm.optimizer has none; 1e-6 for both when left out.",
    ),
    used(f"{ACTOR}optim.betas {CRITIC}optim.betas", "policy.optimizer.betas critic.optimizer.betas"),
    used(
        f"{ACTOR}optim.warmup_style {ACTOR}optim.lr_scheduler_type {ACTOR}optim.lr_decay_style",
        "policy.optimizer.schedule",
        "lr_decay_style with Megatron.",
    ),
    used(
        f"{CRITIC}optim.warmup_style {CRITIC}optim.lr_scheduler_type {CRITIC}optim.lr_decay_style",
        "critic.optimizer.schedule",
        "lr_scheduler_type with FSDP, warmup_style until 2026-01; lr_decay_style with Megatron.",
    ),
    used(
        below(f"{ACTOR}optim. {CRITIC}optim.", "lr_warmup_steps lr_warmup_steps_ratio"),
        "policy.optimizer.warmup_steps critic.optimizer.warmup_steps",
    ),
    used(
        below(f"{ACTOR}optim. {CRITIC}optim.", "lr_warmup_init"),
        "policy.optimizer.warmup_init_lr critic.optimizer.warmup_init_lr",
        "With Megatron: min_lr_ratio x lr when left out, the critic's 0.01 x lr; 0 until 2026-02.",
    ),
    used(below(f"{ACTOR}optim. {CRITIC}optim.", "min_lr_ratio min_lr"), "policy.optimizer.min_lr critic.optimizer.min_lr"),
    used(
        below(f"{ACTOR}optim. {CRITIC}optim.", "lr_decay_steps"),
        "policy.optimizer.decay_steps critic.optimizer.decay_steps",
        "With Megatron.",
    ),
    used(
        below(f"{ACTOR}optim. {CRITIC}optim.", "weight_decay"), "policy.optimizer.weight_decay critic.optimizer.weight_decay"
    ),
    used(
        f"{CRITIC}grad_clip {CRITIC}optim.clip_grad",
        "critic.optimizer.clip_grad",
        "grad_clip with FSDP, trainer.grad_clip when left out; optim.clip_grad with Megatron.",
    ),
    lacks(below(f"{ACTOR}optim. {CRITIC}optim.", "weight_decay_incr_style"), "weight decay that changes", ["constant"]),
    fixed(
        below(f"{ACTOR}optim. {CRITIC}optim.", "lr_wsd_decay_style lr_wsd_decay_steps"), "read with the schedule WSD only"
    ),
    lacks(
        below(f"{ACTOR}optim. {CRITIC}optim.", "optimizer"),
        "another optimizer than AdamW",
        ["AdamW", "adam", "adamw", "Adam"],
    ),
    fixed(
        below(f"{ACTOR}optim. {CRITIC}optim.", "optimizer_impl use_checkpoint_opt_param_scheduler"),
        "AdamW is AdamW, and a resumed run goes on with its schedule",
    ),
    lacks(
        below(f"{ACTOR}optim. {CRITIC}optim.", "override_optimizer_config override_optimizer_config.**"),
        "other settings of the optimizer: policy.megatron.optimizer has its fields",
    ),
    used(
        f"{CRITIC}cliprange_value {CRITIC}ppo_max_token_len_per_gpu {CRITIC}use_dynamic_bsz "
        f"{CRITIC}ppo_micro_batch_size_per_gpu",
        "critic.value_clip critic.tokens_per_micro_batch",
        "A value may not move at all when cliprange_value is left out: it is 0.",
    ),
    lacks(CRITIC + "loss_agg_mode", "another mean of the critic's loss", ["token-mean"]),
    used(VERL + "trainer.critic_warmup", "critic.warmup_steps"),
    used(VERL + "trainer.max_actor_ckpt_to_keep", "trainer.keep"),
    fixed(VERL + "trainer.max_critic_ckpt_to_keep", "a checkpoint has all models: max_actor_ckpt_to_keep says it"),
    lacks(f"{VERL}algorithm.rollout_correction.bypass_mode", "verl's correction below Trinity's losses", [False]),
    lacks(
        below(VERL + "algorithm.rollout_correction.", "rollout_is rollout_rs"),
        "verl's correction below Trinity's losses",
    ),
    fixed(
        (
            *below(
                VERL + "algorithm.rollout_correction.",
                "loss_type rollout_is_batch_normalize rollout_is_threshold rollout_rs_threshold",
            ),
            VERL + "algorithm.rollout_correction",
        ),
        "read with rollout_is or rollout_rs only",
    ),
    fixed(
        (
            *below(ACTOR, "clip_ratio_low clip_ratio_high loss_agg_mode loss_scale_factor policy_loss"),
            *below(
                ACTOR + "policy_loss.",
                "clip_cov_lb clip_cov_ratio clip_cov_ub kl_cov_ratio loss_mode ppo_kl_coef rollout_correction",
            ),
            *below(
                ACTOR + "policy_loss.rollout_correction.",
                "bypass_mode loss_type rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_rs "
                "rollout_rs_threshold",
            ),
            *below(VERL + "algorithm.", "kl_ctrl norm_adv_by_std_in_grpo use_kl_in_reward"),
        ),
        "Trinity's own losses and advantages decide: algorithm says them",
    ),
    used(
        f"{ACTOR}tau {ACTOR}opmd_baseline",
        "algorithm.tau algorithm.advantage algorithm.baseline_temperature",
        "OPMD's of before 2025-06; later in policy_loss_fn_args and advantage_fn_args.",
    ),
    fixed(f"{ACTOR}use_uid {ACTOR}algorithm_type", "of pairwise_opmd"),
    used(
        f"{ACTOR}alg_type",
        "algorithm.updates_per_step",
        "algorithm_type came over it (verl_config.py); where it is, DPO made two updates of a step (until 2025-04-30).",
    ),
    used(
        f"{VERL}algorithm.adv_estimator {VERL}algorithm.gamma {VERL}algorithm.lam {VERL}algorithm.kl_penalty "
        f"{VERL}algorithm.kl_ctrl.type {VERL}algorithm.kl_ctrl.kl_coef {VERL}algorithm.kl_ctrl.horizon "
        f"{VERL}algorithm.kl_ctrl.target_kl",
        "algorithm.name algorithm.advantage algorithm.gamma algorithm.lam algorithm.kl",
        "Read until 2025-06: without a KL in the loss there was one in the reward (verl_trainer.py).",
    ),
    used(f"{CRITIC}ppo_mini_batch_size", "critic", "Until 2025-05 in samples, where the policy's was in prompts."),
    used(f"{VERL}trainer.save_freq", "trainer.save_every", "Until 2025-05."),
    fixed(
        (
            *below(VERL + "data.", "train_batch_size trust_remote_code"),
            *below((VERL + "reward_model.", VERL + "reward.reward_model."), _REWARD_MODEL),
            *below(
                (VERL + "reward_model.model.fsdp_config.", VERL + "reward.reward_model.model.fsdp_config."),
                "_target_ dtype forward_prefetch fsdp_size mixed_precision model_dtype offload_policy optimizer_offload "
                "param_offload reshard_after_forward wrap_policy.min_num_params",
            ),
            *below(VERL, "reward.reward_model custom_reward_function.name custom_reward_function.path"),
            *below(
                VERL + "actor_rollout_ref.rollout.",
                "log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
                "log_prob_use_dynamic_bsz multi_turn multi_turn.enable n temperature val_kwargs val_kwargs.do_sample",
            ),
        ),
        _NEVER_STARTED,
    ),
    fixed(
        f"{VERL}data.* {VERL}reward_model.** {VERL}actor_rollout_ref.rollout.* {VERL}buffer.** "
        f"{VERL}custom_reward_function.*",
        _NEVER_STARTED,
        takes_any=True,
    ),
    fixed(
        below(
            f"{ACTOR}checkpoint. {REFERENCE}checkpoint. {CRITIC}checkpoint.",
            "contents save_contents load_contents async_save mbridge_config mbridge_config.**",
        ),
        "a checkpoint has the whole state; `fivefold export` writes Hugging Face's form",
    ),
    fixed(
        (
            *below(
                _MODELS,
                "profile profile.profile_ranks profile.save_path profile.step_end profile.step_start profile.use_profile "
                "profiler profiler.**",
            ),
            *below(VERL, "global_profiler.** trainer.logger trainer.val_generations_to_log_to_wandb enable_preview"),
        ),
        SHOWN,
    ),
    fixed(
        below(
            VERL + "trainer.",
            "balance_batch default_hdfs_dir del_local_ckpt_after_load device enable_exp_buffer "
            "remove_previous_ckpt_in_save test_freq training_rollout_mode val_before_train",
        ),
        "samples are always dealt by length; the explorer evaluates; checkpoints stay on the machine",
    ),
    fixed(
        below(VERL, "actor_rollout_ref algorithm buffer critic custom_reward_function data reward reward_model trainer")
        + below(VERL, "global_profiler actor_rollout_ref.actor actor_rollout_ref.model actor_rollout_ref.ref")
        + below(VERL, "actor_rollout_ref.rollout actor_rollout_ref.actor.fsdp_config actor_rollout_ref.ref.fsdp_config")
        + below(f"{ACTOR} {REFERENCE} {CRITIC}", "megatron optim checkpoint")
        + below(CRITIC, "model model.fsdp_config"),
        "empty",
    ),
    used("trainer.trainer_config_path", "policy.backend"),
    used(
        below("trainer.actor_", "use_kl_loss kl_loss_coef entropy_coef clip_ratio")
        + below(ACTOR, "use_kl_loss kl_loss_coef kl_loss_type entropy_coeff clip_ratio"),
        "algorithm.kl algorithm.beta algorithm.entropy_coef algorithm.clip_low algorithm.clip_high",
        "Before 2025-06 trainer.actor_* came over verl's keys for the same, which are read where one of them is set "
        "(verl_config.py); with dpo the coefficient is β (dp_actor.py).",
    ),
    fixed(
        below(f"{ACTOR}optim. {CRITIC}optim.", "beta1 beta2"),
        "no optimizer of Trinity's reads them: it asks for betas, which are 0.9 and 0.999 (fsdp_workers.py)",
    ),
    used("trainer.max_checkpoints_to_keep", "trainer.keep", "Of all models, over verl's two keys."),
    fixed(
        "trainer.name trainer.trainer_type trainer.enable_preview trainer.save_hf_checkpoint trainer.save_strategy "
        "trainer.trainer_config",
        "how the trainer is started, shown and saved",
    ),
    fixed("trainer.fix_actor_microbatch_loss_scale", _ANY_CUT),
)
