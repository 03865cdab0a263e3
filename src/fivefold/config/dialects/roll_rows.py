"""What becomes of each of ROLL's keys: the rows of its table."""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.roll_roles import kind
from fivefold.config.dialects.shared import KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.table import Section, below, fixed, lacks, slower, to, used


def _of(roles: str, names: str) -> str:
    return " ".join(f"{role}.{name}" for role in roles.split() for name in names.split())


_STRATEGY = "".join(
    f"**.strategy_args.strategy_config.{name} "
    for name in (
        *("fsdp_size", "efsdp_size", "ep_size", "param_dtype", "reduce_dtype", "offload_policy", "reshard_after_forward"),
        *("apply_expert_patch", "apply_tiled_mlp", "tiled_num_shards", "moe_use_grouped_mm", "use_batched_model_update"),
        "bf16",
    )
)
"""Of strategies other than Megatron's."""
_WORKER = (
    "apply_loss_scale backend_timeout data_args generating_args infer_batch_size logits_in_fp32 max_concurrency "
    "max_tokens_per_microbatch_in_infer max_tokens_per_microbatch_in_train model_args model_update_frequency "
    "mtp_training_mode name opd_kl_coef pg_variant router_replay router_replay.mode "
    "sequence_length_round_in_infer sequence_length_round_in_train sequence_packing_args sequence_packing_args.algorithm "
    "sequence_packing_args.max_packed_sequence_length_forward sequence_packing_args.max_packed_sequence_length_train "
    "sequence_packing_args.min_num_micro_batches_forward sequence_packing_args.min_num_micro_batches_train strategy_args "
    "system_envs tag_included topr_negative_weight topr_positive_weight training_args use_dynamic_batching_in_infer "
    "use_dynamic_batching_in_train use_sequence_packing worker_cls world_size use_remove_padding"
)
"""Fields of WorkerConfig that say how a worker is run, or what only a policy's or a reward's reads."""
_MODEL = (
    "adapter_name_or_path additional_target attn_implementation device_map "
    "disable_gradient_checkpointing freeze_module_prefix "
    "gradient_checkpointing_use_reentrant model_type num_labels ulysses_size flash_attn"
)
_OF_TRANSFORMERS = (
    "bf16 data_seed dataloader_num_workers fp16 max_steps output_dir save_hf_model seed tf32 num_train_epochs "
)
_LEARNING = (
    "adam_beta1 adam_beta2 gradient_accumulation_steps learning_rate lr_scheduler_type per_device_train_batch_size "
    "warmup_ratio warmup_steps weight_decay"
)
_DRAWN = (
    "do_sample include_stop_str_in_output length_penalty logprobs max_length max_new_tokens num_beams num_return_sequences "
    "repetition_penalty stop_strings temperature top_k top_p"
)
_MCORE = (
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split accumulate_allreduce_grads_in_fp32 "
    "additional_configs apply_rope_fusion beta bias_activation_fusion "
    "calculate_per_token_loss check_for_nan_in_loss_and_grad "
    "ckpt_d2h_non_blocking ckpt_format compile_warmup context_parallel_size cross_entropy_loss_fusion cuda_graph_impl "
    "cuda_graph_scope ddp_average_in_collective ddp_bucket_size delay_grad_reduce distrib_optim_fully_reshardable "
    "distrib_optim_fully_reshardable_mem_efficient expert_model_parallel_size expert_tensor_parallel_size hf_config_json "
    "hf_model_type label_smoothing max_sequence_length moe_enable_routing_replay moe_grouped_gemm moe_layer_recompute "
    "moe_parallel_folding moe_token_dispatcher_type moe_token_drop_policy moe_use_shared_expert_gate mtp_num_layers "
    "multi_latent_attention name_or_path optimizer padded_vocab_size pipeline_model_parallel_layout "
    "pipeline_model_parallel_size position_embedding_type pref_loss recompute_granularity "
    "recompute_method recompute_modules "
    "recompute_num_layers rope_parameters rotary_base rotary_percent rotary_scaling rotary_scaling_factor save_hf_model "
    "save_merged_model sequence_packing sequence_parallel squared_relu swiglu tensor_model_parallel_size "
    "tie_embeddings_and_output_weights transformer_impl use_distributed_optimizer variable_seq_lengths "
    "virtual_pipeline_model_parallel_size yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int yarn_mscale "
    "yarn_mscale_all_dim yarn_original_max_position_embeddings yarn_rotary_scaling_factor"
)
"""Options of Megatron-Core in the section of another model than the policy: how it is laid out, or what config.json says."""
_OTHER = "*.strategy_args.strategy_config."
_SAID_OF_OTHERS = (
    *lacks(below(_OTHER, "fp8 fp8_param fp8_recipe"), "computing in 8 bits", [False]),
    *lacks(
        below(_OTHER, "moe_expert_capacity_factor moe_pad_expert_input_to_capacity"),
        "experts that drop tokens: log-probs of the models would differ",
        [False],
    ),
    *lacks(
        _OTHER + "moe_aux_loss_coeff", "a balance loss of another model than the policy: its megatron.transformer", [0, 0.0]
    ),
    *lacks(_OTHER + "moe_router_dtype", "routers that compute in another type: megatron.transformer has it", ["fp32"]),
    *slower(
        below(
            _OTHER,
            "overlap_grad_reduce overlap_p2p_comm overlap_param_gather moe_shared_expert_overlap optimizer_cpu_offload "
            "optimizer_offload_fraction",
        ),
        "communication that is hidden, an optimizer on the host: the model's own section megatron has them",
        [False, 0, 1, 0.0, 1.0],
    ),
    *lacks("critic.model_args.dtype reference.model_args.dtype", "another type than the policy's", ["bf16", "bfloat16"]),
    *lacks("actor_infer.model_args.dtype", "an engine in another type: engine.dtype", ["bf16", "bfloat16"]),
    *fixed("*.model_args.dtype rewards.*.model_args.dtype", "read by no reward that we have"),
    *fixed(
        "*.model_args.autocast_adapter_dtype rewards.*.model_args.autocast_adapter_dtype",
        "adapters are kept in the policy's type, with a float32 copy in the optimizer",
    ),
)
"""Rows for options of critic, reference and engine that are reported or refused."""
SECTIONS = (
    Section.of(
        "Run",
        used("pretrain", "model.path"),
        used("output_dir", "trainer.run_dir"),
        used("seed", "trainer.seed"),
        used("max_steps", "trainer.steps", "Steps of the pipeline decide; num_train_epochs of RLVR is read nowhere."),
        used("save_steps", "trainer.save_every"),
        used("eval_steps", "trainer.eval_every"),
        fixed("validation.eval_steps", "read nowhere under this name: eval_steps says it"),
        used("resume_from_checkpoint", "trainer.resume"),
        used("max_ckpt_to_keep", "trainer.keep", "0 keeps all."),
        to("track_with", "trainer.loggers", shared.loggers),
        used("exp_name", "tracking.name"),
        used("tracker_kwargs.project tracker_kwargs.tags tracker_kwargs.group", "tracking"),
        fixed("tracker_kwargs.api_key", "the tracker's own variable has the key: none stands in our files"),
        fixed(
            "tracker_kwargs.** logging_dir logging_steps checkpoint_config.** "
            "system_envs.** rpc_* profiler_* defaults --config-name --config-path",
            SHOWN,
        ),
        fixed("hydra.**", "how the program is started", takes_any=True),
        fixed(
            "num_gpus_per_node num_nodes offload_nccl **.offload_nccl **.backend_timeout **.world_size "
            "**.num_gpus_per_worker model_update_buffer_size_mb is_num_return_sequences_expand",
            "device_mapping says how many GPUs there are",
        ),
        lacks(
            "-m",
            "another program",
            ["examples/start_rlvr_pipeline.py", "examples/start_sft_pipeline.py", "examples/start_dpo_pipeline.py"],
        ),
        used("reward_pretrain", "critic.path", "Where the critic starts."),
        fixed("global_template **.data_args.template", "the tokenizer's chat template"),
    ),
    Section.of(
        "Algorithm",
        used("adv_estimator", "algorithm.name algorithm.advantage algorithm.credit", "gae when left out, with λ 0.95."),
        used(
            "norm_mean_type norm_std_type reward_norm reward_scale",
            "algorithm.advantage algorithm.normalize",
            "grpo forces group and group. batch is the mean of all rewards of the step (functionals.py:574).",
        ),
        fixed("reward_shift", "it has no effect on normalized rewards"),
        used("reward_clip", "algorithm.reward_clip", "ROLL's bound stands behind the normalization (functionals.py:666)."),
        used("whiten_advantages", "algorithm.whiten algorithm.whiten_by"),
        used("advantage_clip", "algorithm.advantage_clip"),
        used("gamma", "algorithm.gamma"),
        used("lambd", "algorithm.lam"),
        used("pg_clip pg_clip_low pg_clip_high use_pg_clip_range", "algorithm.clip_low algorithm.clip_high"),
        used("dual_clip_loss", "algorithm.dual_clip", "1 + 2 · pg_clip (actor_worker.py:85)."),
        used("importance_sampling", "algorithm.importance_sampling_level"),
        used(
            "loss_agg_mode",
            "algorithm.aggregate",
            "seq-mean-token-mean when left out; seq-mean-token-sum until 2025-08-28 (--from roll@2025-08), token-mean until "
            "2025-06-30 (--from roll@2025-05). ROLL's token-mean sums what lies outside of the mask too "
            "(functionals.py:256); its seq-mean-token-sum-norm divides "
            "by the padded width and not by the samples: a factor that AdamW does not see but clipping does.",
        ),
        used(
            "use_kl_loss kl_loss_coef add_token_level_kl init_kl_coef kl_penalty target_kl kl_horizon",
            "algorithm.kl",
            "In the loss it is k3. With add_token_level_kl each token's reward loses it when rewards have been normalized: "
            "credit: discounted. Both may be on.",
        ),
        used("entropy_loss_coef", "algorithm.entropy_coef"),
        to("ppo_epochs", "algorithm.ppo_epochs", lambda s, k: s.whole(k) if kind(s) == "rlvr" else None),
        used("value_clip", "critic.value_clip"),
        used("max_grad_norm", "policy.optimizer.clip_grad"),
        used("max_len_mask", "algorithm.overlong_filter"),
        used(
            "difficulty_mask difficulty_low_threshold difficulty_high_threshold",
            "algorithm.difficulty_low algorithm.difficulty_high algorithm.difficulty_by",
            "By the mean score of a prompt, both bounds excluded (functionals.py:608): 0 and 1 when left out.",
        ),
        lacks(
            "error_max_len_clip length_loss_weight difficulty_loss_weight use_topr* whiten_rewards",
            "ROLL's own weights of samples",
            [False],
        ),
        used(
            "actor_train.worker_cls actor_train.pg_variant actor_train.tis_lower_bound actor_train.tis_upper_bound "
            "actor_train.topr_positive_weight actor_train.topr_negative_weight actor_train.cispo_epsilon_low "
            "actor_train.cispo_epsilon_high actor_train.cispo_use_unified_mask actor_train.kimi15_tau",
            "algorithm.surrogate algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.clip_mode "
            "algorithm.token_weight algorithm.proximal_coef algorithm.importance_sampling_level",
            "With worker_cls ActorPGWorker, vanilla when left out: REINFORCE. TOPR divides good from bad by the reward "
            "there, by the advantage here: the same for rewards of 0 and 1.",
        ),
        fixed("pg_variant", "ROLL reads it under actor_train only"),
        fixed(
            "*.data_args.max_samples *.name *.training_args.logging_steps *.training_args.save_steps "
            "*.training_args.eval_steps *.training_args.max_grad_norm *.checkpoint_config.** *.model_args.lora_r "
            "*.use_remove_padding track_name early_stop_steps",
            "read nowhere under this name: the pipeline's own keys say it",
            takes_any=True,
        ),
        fixed("model_download_type", "where the model's files come from"),
        fixed(
            "generate_opt_level max_running_requests **.strategy_args.strategy_config.forward_prefetch",
            "how requests are scheduled: the same samples are requested",
            takes_any=True,
        ),
        slower(
            "is_offload_states is_offload_optimizer_states_in_train_step",
            "state that waits on the host between stages: policy.offload",
            [False],
        ),
        lacks("generate_redundancy_num", "more responses than are used, of which the first that are done stay", [0]),
        lacks(
            "is_use_additional_prompts", "more prompts than a step takes, of which the first that are done are used", [False]
        ),
        fixed("max_additional_running_prompts", "read with is_use_additional_prompts only"),
        lacks(
            "dynamic_sampling max_prompts_ratio max_num_return_sequences max_prompts autoscaling multi_infer_tp "
            "infer_scaling_down_progress_ratio scaling_down_train_batch_size",
            "RollPacker's rounds of short responses, more of which are begun than used, and engines that come and go",
            [False, 0, 0.0, -1, 1, 1.0],
        ),
        lacks(
            "infer_correction",
            "correction of the engine's log-probs as of 2025-12: algorithm.rollout_correction",
            [False],
        ),
        fixed(
            "infer_is_mode infer_is_threshold_* enable_token_reject enable_catastrophic_reject enable_seq_reject "
            "infer_token_rs_* infer_catastrophic_threshold infer_seq_rs_*",
            "read with infer_correction only (base_worker.py of a595ec3)",
            takes_any=True,
        ),
        fixed("reward_filter_mean_threshold", "read nowhere"),
        lacks("debug_max_steps", "an end of the run before max_steps: say it there", [0, -1]),
        fixed("report_length_and_rewards", SHOWN),
        lacks("rollout_mock.enable", "responses from a file", [False]),
        fixed("rollout_mock.*", "read with rollout_mock.enable only", takes_any=True),
        lacks("rl_loss_coef", "a factor of the whole loss", [1, 1.0]),
        lacks("positive_loss_coef", "an imitation of good samples beside the policy loss", [0, 0.0]),
        lacks("actor_train.mtp_*", "multi-token prediction", [0]),
        fixed("token_level_loss", "ROLL reads it nowhere: loss_agg_mode decides"),
        fixed(
            "enable_old_logprobs_recompute force_disable_old_logprobs_recompute **.system_envs.** "
            "rollout_dump_dir render_save_dir world_size",
            "old log-probs are the trainer's, computed before the updates",
        ),
        lacks("tag_to_template.**", "chat templates by domain: the tokenizer's is used"),
        lacks(
            "student_infer.** agent_config_common.** *agent_template *agent_system_template reward_normalization.** "
            "max_tokens_per_step max_actions_per_traj batch_adjust_mode default_history_length reward_system_config.**",
            "environments and agents",
        ),
        fixed("error_max_len_threshold", "read with error_max_len_clip only"),
        lacks("train_infer_correction.**", "correction of the engine's log-probs: algorithm.rollout_correction", [False]),
        used(
            "async_generation_ratio",
            "rollout",
            "Whole ones are the same number and the same rule: (r + v + 1) x rollout_batch_size prompts have been begun "
            "when v steps are done, and a step takes the oldest first and waits for them (generate_scheduler.py:228, 347). "
            "Responses go on under new weights: interrupt: continue.",
        ),
        lacks("use_opd is_pure_opd *opd_* teacher.** student.** student_train.**", "learning from a teacher", [False]),
        lacks(
            "env_manager* custom_envs.** train_env_manager.** val_env_manager.** ratio_type step_reward_* episode_reward_*",
            "environments and agents",
        ),
        used("beta label_smoothing ipo", "algorithm.beta algorithm.label_smoothing"),
        used(
            "chosen_key rejected_key prompt_key response_key",
            "data.chosen_key data.rejected_key data.prompt_key data.response_key",
            "SFT's prompt and response are the columns instruction and output when left out.",
        ),
        used(
            "query_key system_key",
            "data.query_key data.system_key",
            "Of SFT: a second part of the prompt on a line of its own, and a system message. Rows keep their order.",
        ),
    ),
    Section.of(
        "Batch and data",
        used(
            "rollout_batch_size num_return_sequences_in_group actor_infer.generating_args.num_return_sequences",
            "data.prompts_per_step algorithm.group_size",
            "Prompts, and samples of each.",
        ),
        used(
            _of(
                "actor_train sft_train",
                "training_args.per_device_train_batch_size training_args.gradient_accumulation_steps",
            ),
            "algorithm.updates_per_step policy.tokens_per_micro_batch data.prompts_per_step",
            "Their product and the replicas are the samples of an update (base_config.py:787).",
        ),
        used("prompt_length response_length sequence_length", "data.max_prompt_tokens data.max_response_tokens"),
        fixed("train_batch_size val_batch_size", "per_device_train_batch_size x gradient_accumulation_steps says it"),
        used(_of("actor_train sft_train", "data_args.file_name"), "data.train"),
        used("validation.data_args.file_name", "data.val"),
        used(
            "actor_train.data_args.domain_interleave_probs.*",
            "data.mixture",
            "As many prompts of each domain in every step: its share of rollout_batch_size rounded down, and what is left "
            "to the one that is named last, so shares need not sum to 1 (rlvr_pipeline.py:283). A domain's rows are "
            "shuffled anew when they end, within the step (generate_scheduler.py:796), as here. Advantages are whitened "
            "in each domain (rlvr_pipeline.py:713).",
        ),
        used("actor_train.data_args.tag", "data.source_key"),
        used(
            "actor_train.data_args.messages actor_train.data_args.prompt",
            "data.prompt_key",
            "The column of messages, which may be JSON in a text, goes before that of the prompt (rlvr_pipeline.py:96).",
        ),
        lacks("**.data_args.custom_data_kwargs_func", "a function that reads the data"),
        fixed(
            _of(
                "**.data_args",
                "interleave_probs dataset_dir dataset_type preprocessing_num_workers messages prompt response tag id "
                "file_name eval_file_name audio_folder image_folder image_max_pixels "
                "image_min_pixels video_folder video_fps "
                "video_max_frames video_max_pixels video_min_pixels video_resize_chunk_frames video_total_pixels",
            ),
            "how data are read",
        ),
        used(
            "rewards.*.tag_included",
            "data.domains reward.by_source data.ground_truth_by_source",
            "A row's tag decides; a column `domain`, which goes before it in ROLL, is not read. Other tags are math_rule's.",
        ),
        used(
            "rewards.*.worker_cls rewards.*.reward_type",
            "reward.functions reward.by_source",
            "By the worker's class: math; ifeval and multiple choices with ROLL's penalty of repeated 3-grams; programs "
            "with their tests in `test_cases`; a judge. ROLL's exact keyword count of ifeval counts all words "
            "(ifeval_rule_reward_worker.py:118), here that word. What cannot be judged has 0 there, and fails here.",
        ),
        used("rewards.*.use_local rewards.*.response_length_penalty_coef", "reward.by_source"),
        used(
            "rewards.*.judge_model_type rewards.*.judge_prompt rewards.*.judge_api_url rewards.*.judge_model_name",
            "reward.judge",
            "The judge's prompt asks the same in words of ours; reward.judge.prompt takes others. A verdict is its first "
            "yes or no, where ROLL looks for a yes anywhere (llm_judge_reward_worker.py:152).",
        ),
        fixed("rewards.*.judge_api_key", "never copied: the variable JUDGE_API_KEY is to have it"),
        used(
            "rewards.*.model_args.model_name_or_path rewards.*.device_mapping rewards.*.strategy_args.strategy_config.* "
            "rewards.*.generating_args.* rewards.*.num_gpus_per_worker",
            "reward.judge",
            "Of a judge of the type inference: servers on GPUs of their own, as many, behind those of policy and engine, "
            "where ROLL lends it GPUs of the policy.",
        ),
        lacks(
            "rewards.*.query_filter_config.type rewards.*.response_filter_config.type",
            "filters of prompts and responses: algorithm.dynamic_sampling",
            ["no_filter"],
        ),
        lacks("rewards.*.reward_manager_config", "plugins of rewards"),
        lacks("rewards.*.format_pattern rewards.*.code_url", "read by other workers than those that are known"),
        lacks("rewards.*.model_args.lora_dropout", "dropout", [0, 0.0]),
        fixed(
            (
                *below(
                    "rewards.*.",
                    _WORKER + " query_filter_config response_filter_config llm_proxy strategy_args.strategy_name",
                ),
                *below("rewards.*.", "llm_proxy.proxy_config llm_proxy.proxy_type"),
                *below("rewards.*.model_args.", _MODEL),
                *below("rewards.*.", "device_mapping num_gpus_per_worker"),
                *below("rewards.*.training_args.", _OF_TRANSFORMERS + _LEARNING),
                *below("rewards.*.generating_args.", _DRAWN),
            ),
            "how the worker is run",
        ),
        fixed("rewards.*.llm_proxy.** rewards.*.system_envs.** rewards.*.*_filter_config.*", "how the worker is run"),
        used("validation.generating_args.*", "eval.samples eval.temperature eval.top_p"),
    ),
    Section.of(
        "Roles",
        used(_of("actor_train sft_train", "device_mapping"), "policy.backend", "Parsed, never evaluated."),
        used(
            _of("actor_train sft_train", "strategy_args.strategy_name"),
            "policy.backend",
            "deepspeed_train and fsdp2_train become data-parallel Megatron-Core on as many GPUs.",
        ),
        used(
            _of("actor_train sft_train", "strategy_args.strategy_config.*_parallel_size model_args.ulysses_size"),
            "policy.backend policy.megatron.pipeline",
        ),
        fixed(
            _of("actor_train", "strategy_args.strategy_config.sequence_parallel"),
            "always on where there are tensor ranks: the same numbers up to rounding",
        ),
        used(
            _of("actor_train sft_train", "strategy_args.strategy_config.**"),
            "policy.megatron policy.recompute policy.sequence_parallel",
        ),
        fixed(_of("actor_train sft_train", "strategy_args.strategy_config"), "empty"),
        used(_of("actor_train sft_train", "model_args.disable_gradient_checkpointing"), "policy.recompute"),
        lacks(
            _of("actor_train sft_train", "model_args.dtype"), "training in another type: policy.dtype", ["bf16", "bfloat16"]
        ),
        *(
            used(_of("actor_train sft_train", f"model_args.{theirs}"), f"policy.lora.{ours}", note)
            for theirs, ours, note in (
                ("lora_rank", "rank", "With lora_target; 8 when left out."),
                ("lora_alpha", "alpha", "Twice the rank when left out."),
                ("lora_target", "target_modules", ""),
                ("adapter_name_or_path", "path", "Its r and lora_alpha must be those set here."),
                ("lora_dropout", "rank", "Another one than 0 is refused."),
                ("additional_target", "rank", "Refused where it names something."),
            )
        ),
        lacks("critic.model_args.lora_target", "adapters of the critic: critic.lora has them", []),
        fixed(
            "**.model_args.lora_alpha **.model_args.lora_dropout **.model_args.lora_rank **.model_args.lora_target "
            "lora_* lora_rank lora_target lora_alpha",
            "the engine is given the merged weights",
        ),
        lacks("actor_train.model_args.model_type", "other models than language models"),
        lacks("**.model_args.model_config_kwargs.**", "changes of config.json"),
        used(
            _of("actor_train sft_train", "model_args.moe_aux_loss_coef"),
            "policy.megatron.transformer",
            "Of Megatron-Core: router_aux_loss_coef of config.json when left out (policy.router_balance: config).",
        ),
        lacks("critic.model_args.moe_aux_loss_coef", "a critic's own: critic.megatron.transformer has it"),
        fixed("*.model_args.moe_aux_loss_coef rewards.*.model_args.moe_aux_loss_coef", "the model only computes"),
        lacks("actor_train.model_args.freeze_module_prefix", "parts of the model that do not learn"),
        used(_of("actor_train sft_train", "model_args.model_name_or_path"), "model.path"),
        used("reference.model_args.model_name_or_path", "reference.path"),
        fixed(
            _of(
                "**.model_args",
                "attn_implementation flash_attn disable_gradient_checkpointing model_type model_name_or_path "
                "gradient_checkpointing_use_reentrant device_map num_labels additional_target "
                "adapter_name_or_path ulysses_size freeze_module_prefix",
            ),
            KERNELS,
        ),
        *(
            row
            for start in ("actor_train", "sft_train")
            for rows in (
                used(f"{start}.training_args.learning_rate", "policy.optimizer.lr", "5e-5 when left out."),
                used(f"{start}.training_args.weight_decay", "policy.optimizer.weight_decay"),
                used(
                    f"{start}.training_args.warmup_steps {start}.training_args.warmup_ratio",
                    "policy.optimizer.warmup_steps",
                    "Optimizer steps, the first with rate 0, as torch's schedulers: warmup_from: 0.",
                ),
                used(
                    f"{start}.training_args.lr_scheduler_type",
                    "policy.optimizer.schedule",
                    "linear when left out: the rate falls to 0 over the run.",
                ),
                used(f"{start}.training_args.adam_beta*", "policy.optimizer.betas"),
            )
            for row in rows
        ),
        used(_of("actor_train sft_train", "training_args.num_train_epochs"), "trainer.epochs"),
        lacks(_of("actor_train sft_train", "training_args.fp16"), "training in float16: policy.dtype", [False]),
        fixed(
            _of(
                "actor_train sft_train",
                "training_args.bf16 training_args.data_seed training_args.dataloader_num_workers training_args.max_steps "
                "training_args.output_dir training_args.save_hf_model training_args.seed training_args.tf32 "
                "training_args.disable_tqdm",
            ),
            "of transformers' trainer, which does not run",
        ),
        used(
            _of("actor_train sft_train", "use_dynamic_batching_in_train max_tokens_per_microbatch_in_train"),
            "policy.tokens_per_micro_batch",
        ),
        fixed(
            _of(
                "actor_train sft_train",
                "infer_batch_size use_dynamic_batching_in_infer max_tokens_per_microbatch_in_infer "
                "sequence_length_round_in_infer sequence_length_round_in_train use_remove_padding use_sequence_packing "
                "sequence_packing_args sequence_packing_args.algorithm "
                "sequence_packing_args.max_packed_sequence_length_forward "
                "sequence_packing_args.max_packed_sequence_length_train sequence_packing_args.min_num_micro_batches_forward "
                "sequence_packing_args.min_num_micro_batches_train "
                "logits_in_fp32 apply_loss_scale",
            ),
            "no cut changes the numbers",
        ),
        used("actor_train.router_replay.mode", "policy.router_replay engine.mode", "ROLL has R3 alone, with servers here."),
        fixed("actor_train.router_replay.*", "read with its mode only"),
        used("critic.training_args.*", "critic.optimizer"),
        used(
            "reference.strategy_args.strategy_name reference.strategy_args.strategy_config.*_parallel_size "
            "critic.strategy_args.strategy_name critic.strategy_args.strategy_config.*_parallel_size "
            "reference.device_mapping critic.device_mapping",
            "reference.backend critic.backend reference.megatron.pipeline critic.megatron.pipeline reference.first_rank "
            "critic.first_rank engine.mode",
            "Of Megatron. Ranks of their own where none of their GPUs is the policy's or the engine's, the policy's "
            "otherwise. Its layout where nothing is said, with another strategy, or where the ranks cannot be divided so.",
        ),
        *_SAID_OF_OTHERS,
        fixed(
            below("critic.", _WORKER)
            + below("critic.model_args.", _MODEL)
            + below("critic.training_args.", _OF_TRANSFORMERS),
            "how the worker is run: the critic has the policy's settings",
        ),
        fixed(
            (
                *below("reference. actor_infer.", _WORKER),
                "actor_infer.model_args.model_name_or_path",
                *below("reference.model_args. actor_infer.model_args.", _MODEL),
                *below("reference.training_args. actor_infer.training_args.", _OF_TRANSFORMERS + _LEARNING),
                *below("reference.generating_args. critic.generating_args.", _DRAWN),
            ),
            "how the worker is run: the model only computes, by the policy's settings",
        ),
        fixed("reference_configs.**", "how references of several teachers are run, which only distillation has"),
        used(
            _of(
                "actor_infer",
                "strategy_args.strategy_name strategy_args.strategy_config.tensor_parallel_size "
                "strategy_args.strategy_config.tp_size num_gpus_per_worker",
            ),
            "engine.backend",
            "sglang becomes vLLM.",
        ),
        used(
            "actor_infer.device_mapping",
            "engine.backend engine.placement",
            "GPUs of its own are those behind the policy's; where some are shared, the policy's.",
        ),
        used(
            _of(
                "actor_infer",
                "strategy_args.strategy_config.gpu_memory_utilization strategy_args.strategy_config.mem_fraction_static",
            ),
            "engine.memory_fraction",
        ),
        used("actor_infer.strategy_args.strategy_config.max_model_len", "engine.max_model_len"),
        used("actor_infer.strategy_args.strategy_config.enforce_eager", "engine.vllm"),
        used(
            "actor_infer.generating_args.temperature actor_infer.generating_args.top_p "
            "actor_infer.generating_args.top_k actor_infer.generating_args.num_beams",
            "engine.sampling",
            "0.95, 0.7 and 50 when left out. ROLL's trainer does not divide logits by the temperature, ours does: "
            "ratios compare the distribution that was sampled from.",
        ),
        fixed("actor_infer.generating_args.max_new_tokens", "response_length says it"),
        fixed("actor_infer.generating_args.logprobs", "log-probs are always recorded"),
        fixed("actor_infer.generating_args.length_penalty", "read with beams only"),
        lacks("actor_infer.generating_args.do_sample", "the most likely tokens: temperature 0", [True]),
        lacks("actor_infer.generating_args.*", "another way of sampling"),
        lacks("actor_infer.generating_args.repetition_penalty", "engine.sampling.repetition_penalty", [1, 1.0]),
        lacks(
            below("actor_infer.strategy_args.strategy_config.", "quantization kv_cache_dtype quantization_param_path"),
            "an engine that quantizes weights or its cache: engine.vllm has both",
            ["auto"],
        ),
        lacks("actor_infer.strategy_args.strategy_config.dtype", "an engine in another type", ["auto", "bfloat16", "bf16"]),
        slower(
            below("actor_infer.strategy_args.strategy_config.", "cpu_offload_gb swap_space speculative_config"),
            "memory of the host, speculative decoding: engine.vllm has vLLM's own keys",
            [0],
        ),
        fixed(
            "actor_infer.strategy_args.strategy_config.*",
            "how the engine serves: the same distribution is sampled",
        ),
        fixed("actor_infer.strategy_args.strategy_config actor_infer.generating_args.max_length", "response_length says it"),
        fixed(
            "**.strategy_args.strategy_config.additional_configs.** **.strategy_args.strategy_config.wrap_policy.* "
            "**.strategy_args.strategy_config.zero_optimization.** **.strategy_args.strategy_config.bf16.* "
            "**.strategy_args.strategy_config.train_micro_batch_size_per_gpu "
            "**.strategy_args.strategy_config.gradient_clipping",
            SPREAD,
            takes_any=True,
        ),
        fixed(_STRATEGY, "how other strategies shard: the sums are those of data-parallel Megatron-Core"),
        fixed(
            (
                *below("*.strategy_args.strategy_config.", _MCORE),
                *below("critic. reference. validation. rewards.*.", "strategy_args.strategy_config"),
                *below("reward. reward_model.", "strategy_args.strategy_name strategy_args.strategy_config"),
            ),
            SPREAD,
        ),
        fixed(
            below("validation.", _WORKER + " device_mapping num_gpus_per_worker model_args.model_name_or_path")
            + below("validation.model_args.", _MODEL)
            + below("validation.training_args.", _OF_TRANSFORMERS + _LEARNING)
            + ("validation.strategy_args.strategy_name",),
            "validation is the policy's and its engine's",
        ),
    ),
)
