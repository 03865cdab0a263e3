"""What becomes of each of AReaL's keys: the rows of its table."""

from __future__ import annotations

import re
from pathlib import Path

from fivefold.config.dialects import shared
from fivefold.config.dialects.shared import KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Convert, Section, below, fixed, lacks, slower, to, used

GSM8K = "data/gsm8k-areal"
"""Directory of GSM8K with AReaL's own prompts, which `fivefold data gsm8k --form areal` writes."""


def is_gsm8k(path: str | None) -> bool:
    """GSM8K by its name on the hub, whose rows AReaL's own code makes (areal/dataset/gsm8k.py)."""
    return path is not None and "gsm8k" in path and bool(re.fullmatch(r"[\w-]+/[\w-]+", path)) and not Path(path).exists()


def files_of(split: str) -> Convert:
    """A path or a list of them; GSM8K by its name on the hub is the file that we write of it."""

    def convert(source: Source, key: str) -> list[str] | None:
        return [f"{GSM8K}/{split}.parquet"] if is_gsm8k(source.text(key)) else shared.files(source, key)

    return convert


_OF_REFERENCE = (
    "adv_norm archon behav_imp_weight_cap behave_imp_weight_cap behave_imp_weight_mode "
    "beta c_clip discount dynamic_sampling "
    "eps_clip eps_clip_higher fsdp gae_lambda gradient_checkpointing group_size "
    "importance_sampling_level kl_ctl kl_estimator "
    "log_agent_stats log_agent_stats_keys loss_type m2_threshold mask_no_eos_with_zero max_new_tokens mb_spec megatron "
    "overlong_penalty_factor overlong_reward_penalty overlong_tokens path "
    "ppo_n_minibatches prox_logp_method recompute_logprob "
    "rejection_sampling reward_bias reward_clip reward_norm reward_scaling sapo_tau_neg sapo_tau_pos scheduling_spec "
    "scheduling_strategy temperature use_decoupled_loss use_sapo_loss"
)
_OF_SGLANG = (
    "allow_auto_truncate attention_backend chunked_prefill_size context_length cuda_graph_bs cuda_graph_max_bs "
    "decode_log_interval disable_cuda_graph disable_cuda_graph_padding "
    "disable_custom_all_reduce disable_outlines_disk_cache "
    "disable_overlap_schedule disable_radix_cache dp_size enable_dp_attention enable_ep_moe enable_fast_load enable_lora "
    "enable_memory_saver enable_metrics enable_mixed_chunk enable_multimodal enable_multithread_load enable_nan_detection "
    "enable_nccl_nvls enable_p2p_check enable_return_routed_experts enable_torch_compile ep_size log_level log_level_http "
    "log_requests log_requests_level lora_backend lora_paths lora_target_modules max_loaded_loras max_lora_rank "
    "max_loras_per_batch max_prefill_tokens max_running_requests model_path num_continuous_decode_steps random_seed "
    "sampling_backend schedule_conservativeness schedule_policy show_time_cost skip_tokenizer_init torch_compile_max_bs "
    "triton_attention_num_kv_splits triton_attention_reduce_in_fp32"
)
SECTIONS = (
    Section.of(
        "Placement",
        used(
            "actor.backend model.backend allocation_mode",
            "policy.backend",
            "fsdp:d4 becomes megatron:d4. Names, dots (sglang.d4p1m1), `+eval` and the order of letters are read.",
        ),
        used(
            "rollout.backend",
            "engine.backend",
            "On GPUs of its own, behind the trainer's; with | in allocation_mode or a scheduling_strategy that colocates "
            "the two, on the trainer's. sglang becomes vLLM.",
        ),
        used(
            "rollout.scheduling_strategy.type rollout.scheduling_strategy.target actor.scheduling_strategy.type "
            "actor.scheduling_strategy.target",
            "engine.placement engine.backend",
        ),
        used(
            "rollout.max_head_offpolicyness rollout.consumer_batch_size async_training",
            "rollout",
            "The same number and the same rule: at most (k + v + 1) x consumer_batch_size prompts are given out when v "
            "steps are done (staleness_manager.py:93), so consumer_batch_size must be train_dataset.batch_size. Responses "
            "go on under new weights: interrupt: continue. A step takes the oldest prompts that are complete "
            "(workflow_executor.py:591): tail: carry. What takes longer than k steps AReaL uses all the same, older than k; "
            "here its prompt is sampled again.",
        ),
        used(
            "rollout.max_concurrent_rollouts",
            "engine.max_num_seqs",
            "Prompts in flight at once, consumer_batch_size when left out: samples of each replica here, where that is less "
            "than what may be given out. Without staleness it changes nothing.",
        ),
        used(
            "critic.backend ref.backend",
            "reference.backend critic.backend",
            "On the policy's ranks. The policy's where it is left out, or where the ranks cannot be divided so.",
        ),
        fixed(
            "critic.scheduling_* ref.scheduling_* **.scheduling_spec **.scheduling_strategy.* **.scheduling_strategy",
            "all models of the trainer share the policy's GPUs",
        ),
        fixed(
            "cluster.n_nodes cluster.n_gpus_per_node cluster.name_resolve.* cluster.cluster_name scheduler.* "
            "scheduler launcher launcher.** enable_offload",
            "the layout says how many GPUs; how they are started is launch's",
        ),
        fixed(
            "rollout.queue_size "
            "rollout.enable_rollout_tracing rollout.dump_to_file rollout.fileroot rollout.tokenizer_path "
            "rollout.setup_timeout rollout.request_* rollout.pause_grace_period "
            "rollout.check_trajectory_format rollout.experiment_name rollout.trial_name rollout._version "
            "rollout.model "
            "rollout.routing_strategy rollout.poll_interval rollout.*_api_key rollout.api_url rollout.lora_name "
            "rollout.schedule_policy rollout.workers_ready_timeout rollout.pause_generation_clearance_period "
            "rollout.serialize_group_samples rollout.use_gateway actor.workers_ready_timeout ref.workers_ready_timeout",
            "how requests are spread",
        ),
        fixed("rollout.use_lora", "the engine is given the merged weights"),
        used(
            "rollout.return_routed_experts",
            "policy.router_replay engine.mode",
            "R3: the trainer takes the experts that the engine took (megatron_engine.py). vLLM samples in a server then.",
        ),
        lacks("rollout.deterministic_sampling gconfig.seed", "samples that are the same in every run", [False]),
        fixed("awex.**", "how weights travel to the engine: the engine has the trainer's after every step", takes_any=True),
        slower(
            "actor.enable_delta_weight_update actor.dte.enabled",
            "weights that are sent as what changed: all of them are sent",
            [False],
        ),
        fixed(
            "actor.dte.** actor.weight_update_* actor.colocated actor.colocated_weight_path",
            "how weights travel to the engine",
            takes_any=True,
        ),
        fixed(
            "n_nodes n_gpus_per_node **.scheduling_specs **.scheduling_spec.type post_exit_hook actor.scheduling_spec.** "
            "rollout.scheduling_spec.** ref.scheduling_spec.** model.scheduling_spec.**",
            "the layout says how many GPUs; how they are started is launch's",
            takes_any=True,
        ),
        fixed("rollout.agent.** rollout.openai.**", "read by agents only"),
    ),
    Section.of(
        "Model and training",
        used("actor.path model.path", "model.path"),
        used("tokenizer_path", "model.tokenizer"),
        used("actor.dtype model.dtype", "policy.dtype"),
        used(
            "actor.gradient_checkpointing model.gradient_checkpointing actor.megatron.recompute_* "
            "model.megatron.recompute_*",
            "policy.recompute policy.megatron.transformer",
        ),
        used("*.megatron.virtual_pipeline_parallel_size", "policy.megatron.pipeline"),
        used("*.megatron.use_deterministic_algorithms", "trainer.deterministic"),
        used(
            "*.megatron.bridge_type",
            "policy.megatron.bridge_type",
            "mbridge is AReaL's default; weights are read by our own tables: the same numbers.",
        ),
        lacks("*.megatron.fp8_config *.megatron.fp8_config.* *.archon.fp8_config.mode", "training in 8 bits", ["disabled"]),
        lacks("*.megatron.fp8 *.megatron.fp8_*", "training in 8 bits", [False]),
        lacks("*.megatron.moe_z_loss_coeff *.megatron.moe_router_bias_update_rate", "what balances experts", [0, 0.0]),
        lacks(
            "actor.enable_mtp_training *.megatron.enable_mtp_training",
            "layers for further tokens that learn apart from the output layer (megatron_engine.py:199 of 71cecba5f): "
            "policy.mtp trains that too",
            [False],
        ),
        fixed(
            "actor.mtp_* *.megatron.mtp_* *.megatron.enable_mtp *.optimizer.mtp_lr_scale",
            "read with enable_mtp_training only",
            takes_any=True,
        ),
        fixed(
            "*.megatron.enable_fp32_lm_head *.megatron.cross_entropy_loss_fusion *.megatron.lm_head_loss_chunk_size "
            "*.megatron.enable_chunked_logits *.megatron.entropy_requires_grad *.megatron.moe_router_fusion "
            "*.megatron.use_areal_lm_head *.megatron.use_bridge_for_update_weights "
            "*.megatron.disable_grad_buffers_cpu_backup *.archon.activation_checkpoint.mode *.logprobs_chunk_size",
            KERNELS,
            takes_any=True,
        ),
        used(
            below("actor. model.", "offload fsdp.offload_params optimizer.offload"),
            "policy.offload",
            "Between the stages of a step; an optimizer that computes on the host is megatron.optimizer's.",
        ),
        slower(
            "*.offload *.fsdp.offload_params *.archon.offload_params *.optimizer.offload *.fsdp.offload_optimizer "
            "*.fsdp.offload_policy *.fsdp.per_layer_optim_step",
            "state that waits on the host: policy.offload moves the policy's and with it "
            "the reference's, critic.offload the "
            "critic's",
            [False],
        ),
        slower(
            below(
                "*.megatron.",
                "ddp.overlap_grad_reduce ddp.overlap_param_gather overlap_param_gather_with_optimizer_step "
                "moe_shared_expert_overlap moe_enable_deepep moe_permute_fusion distribute_saved_activations",
            ),
            "communication that is hidden, other kernels: policy.megatron has its fields",
            [False],
        ),
        slower(
            "*.megatron.use_torch_fsdp2 *.megatron.use_custom_fsdp",
            "FSDP below Megatron-Core: the distributed optimizer shards instead",
            [False],
        ),
        lacks("*.megatron.ddp.fp8_param_gather", "weights that are gathered in 8 bits", [False]),
        lacks("*.megatron.wrap_with_ddp", "replicas whose gradients are not summed", [True]),
        lacks(
            (
                *below("*.megatron.", "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype"),
                *below("*.", "grad_reduce_dtype optimizer_dtype"),
            ),
            "sums or an optimizer's state in another type: policy.megatron.optimizer has its fields",
            ["float32", "fp32"],
        ),
        lacks(
            "*.megatron.ddp.grad_reduce_in_fp32", "gradients that are summed in 16 bits: policy.megatron.ddp has it", [True]
        ),
        slower("*.megatron.use_precision_aware_optimizer", "policy.megatron.optimizer has it", [False]),
        lacks(
            "*.megatron.moe_router_dtype *.archon.moe_router_dtype",
            "routers that compute in another type: policy.megatron.transformer has it",
            ["fp32", "float32"],
        ),
        to("actor.megatron.async_save", "trainer.async_save", shared.flag),
        to("model.megatron.async_save", "trainer.async_save", shared.flag),
        fixed(
            (
                *below("*.megatron.", "async_save use_checkpoint_opt_param_scheduler use_mbridge_save fp8_config"),
                *below("*.megatron.", "moe_token_dispatcher_type ddp recompute_granularity recompute_method"),
                *below("*.megatron.", "recompute_modules recompute_num_layers bridge_type"),
                *below(
                    "*.megatron.ddp.",
                    "align_param_gather average_in_collective bucket_size check_for_nan_in_grad use_distributed_optimizer",
                ),
                *below("*.fsdp.", "memory_efficient_load optim_step_prefetch_layers shard_vision_across_sp wrap_policy"),
                "*.fsdp.wrap_policy.transformer_layer_cls_to_wrap",
            ),
            SPREAD,
        ),
        fixed(
            (
                *below(
                    "*.archon.",
                    "ac_debug ac_memory_budget ac_mode ac_preserve_rng_state attn_type enable_compile fp8_config",
                ),
                *below("*.archon.", "pp_first_stage_less_layers pp_last_stage_less_layers pp_layers_per_stage pp_schedule"),
                *below("*.archon.", "reshard_after_forward_policy selective_ac_option use_deterministic_algorithms"),
                *below("*.archon.fp8_config.", "exclude_modules include_experts use_triton"),
            ),
            "Archon becomes Megatron-Core, whose layers have options of their own",
        ),
        used(
            "actor.mb_spec.max_tokens_per_mb model.mb_spec.max_tokens_per_mb",
            "policy.tokens_per_micro_batch",
            "At least the longest prompt and response.",
        ),
        fixed(
            "*.mb_spec.granularity *.mb_spec.n_mbs *.mb_spec.n_mbs_divisor *.mb_spec.max_tokens_per_mb "
            "*.mb_spec.packing_algorithm *.pad_to_maximum *.weight_update_mode *.attn_impl *.use_kernels "
            "*.enable_tree_training *.tree_training_mode *.packing_algorithm *.dta_block_size *.pad_mbs_to_max_tokens",
            "no cut and no kernel changes the numbers",
        ),
        fixed("*.disable_dropout", "there is no dropout"),
        lacks("*.init_from_scratch", "weights that are drawn", [False]),
        fixed(
            "*.is_critic *.experiment_name *.trial_name *._version *.log_level *.admin_api_key "
            "*.request_timeout *.setup_timeout",
            "AReaL's own bookkeeping",
        ),
        *(
            used(f"{role}.{theirs}", f"{ours}.lora.{part}", note)
            for role, ours in (("actor", "policy"), ("model", "policy"), ("critic", "critic"))
            for theirs, part, note in (
                ("use_lora", "rank", ""),
                ("lora_rank", "rank", "32 when left out."),
                ("lora_alpha", "alpha", ""),
                ("target_modules", "target_modules", "All linear maps where there are none."),
                ("peft_type", "rank", "Others than lora are refused."),
            )
        ),
        lacks("*.use_lora", "adapters of another model", [False]),
        fixed("*.lora_rank *.lora_alpha *.target_modules *.peft_type", "read with use_lora only"),
        lacks("*.lora_dropout", "dropout", [0, 0.0]),
        fixed("*.use_merged_lora", "the engine is given the merged weights"),
        lacks("model.is_reward_model actor.is_reward_model", "the training of reward models", [False]),
        *(
            row
            for role in ("actor", "model")
            for rows in (
                used(f"{role}.optimizer.lr", "policy.optimizer.lr"),
                used(f"{role}.optimizer.weight_decay", "policy.optimizer.weight_decay"),
                used(f"{role}.optimizer.eps", "policy.optimizer.eps"),
                used(f"{role}.optimizer.beta1 {role}.optimizer.beta2", "policy.optimizer.betas"),
                used(f"{role}.optimizer.gradient_clipping", "policy.optimizer.clip_grad"),
                used(f"{role}.optimizer.lr_scheduler_type", "policy.optimizer.schedule"),
                used(f"{role}.optimizer.min_lr_ratio", "policy.optimizer.min_lr"),
                used(
                    f"{role}.optimizer.warmup_steps_proportion {role}.optimizer.warmup_steps",
                    "policy.optimizer.warmup_steps",
                    "A share of the run, or so many, in steps of the run from rate 0 on: the schedule moves once a step.",
                ),
                used(
                    f"{role}.optimizer.type",
                    "policy.optimizer",
                    "AdamW. adam_bf16 is taken with moments in float32, sgd is refused.",
                ),
            )
            for row in rows
        ),
        lacks("*.optimizer.type", "another optimizer than AdamW", ["adam", "adamw"]),
        fixed(
            (*below("*.optimizer.", "hysteresis initial_loss_scale loss_scale_window min_loss_scale"), "*.optimizer"),
            "read in float16 only",
        ),
        used("total_train_epochs", "trainer.epochs"),
        used("total_train_steps", "trainer.steps"),
        lacks("total_train_n_seqs", "a bound by sequences: say total_train_steps"),
    ),
    Section.of(
        "PPO",
        used(
            "actor.ppo_n_minibatches",
            "algorithm.updates_per_step",
            "AReaL balances tokens between updates, here each has as many prompts.",
        ),
        used("actor.eps_clip actor.eps_clip_higher", "algorithm.clip_low algorithm.clip_high"),
        used("actor.use_cispo_loss", "algorithm.surrogate"),
        lacks("actor.gae_timestep_unit", "advantages of turns", ["token"]),
        lacks("actor.gae_lambda_kwargs actor.gae_lambda_kwargs.**", "a λ that a function of the user's computes"),
        lacks(
            "actor.enable_icepop actor.enable_kpop actor.use_prox_approx actor.enable_MIS_TIS_correction "
            "enable_segment_wise_ppo rollout.enable_segment_wise_ppo",
            "a switch of a branch: rejection_sampling says which tokens are left out since 2026-04",
            [False],
        ),
        fixed(
            "actor.icepop_* actor.kpop_* actor.prox_approx_method actor.log_prox_approx_metrics",
            "read with their switch only",
            takes_any=True,
        ),
        lacks("actor.behav_imp_weight_floor", "a lower bound of the weight"),
        lacks("actor.aent.**", "AEnt: an entropy of the likeliest tokens alone, whose coefficient moves"),
        lacks("dynamic_hint.**", "hints in prompts, the more the harder they are"),
        lacks("actor.adv_norm.adv_norm_mode actor.adv_norm.aggregation_mode", "MAPO's mixture of two deviations"),
        lacks("actor.sft_reg", "a loss of imitation beside the surrogate", [0, 0.0]),
        used("actor.c_clip", "algorithm.dual_clip"),
        used(
            "actor.use_sapo_loss actor.sapo_tau_pos actor.sapo_tau_neg",
            "algorithm.surrogate algorithm.temperature_positive algorithm.temperature_negative",
        ),
        used("actor.importance_sampling_level", "algorithm.importance_sampling_level"),
        used(
            "actor.beta actor.loss_type beta loss_type",
            "algorithm.name algorithm.beta",
            "DPO; train_dataset.type dpo asks for it too. There a row has the whole text of both, and what they begin with "
            "alike is the prompt: here that is a column of its own.",
        ),
        lacks(
            "econfig.** tir.** workflow eval_workflow agent_run_args.** reward_fn_path agent_builder_path "
            "export_style max_tokens_per_trajectory max_turns max_tool_uses sandbox_type execd_endpoint code_timeout",
            "agents",
        ),
        used(
            "actor.m2_threshold",
            "algorithm.rollout_correction.reject_divergence",
            "Read with use_decoupled_loss. AReaL leaves out tokens in each micro-batch and divides by those that stay "
            "(actor.py:769), here as in the paper (2510.01161): among the whole update, and by all of its tokens.",
        ),
        used(
            "actor.reward_norm.mean_level actor.reward_norm.std_level actor.reward_norm.mean_leave1out",
            "algorithm.advantage algorithm.normalize",
            "Unbiased deviation, ε 1e-5 there and 1e-6 here. With mean_leave1out the mean of the group's others.",
        ),
        fixed(
            "actor.reward_norm.group_size actor.adv_norm.group_size actor.group_size actor.max_new_tokens actor.reward_norm "
            "actor.adv_norm.max_new_tokens actor.context_length context_length",
            "gconfig says it",
        ),
        used(
            "actor.adv_norm actor.group_adv_norm actor.group_reward_norm",
            "algorithm.advantage algorithm.normalize algorithm.whiten algorithm.whiten_by",
            "Of until 2025-09, as true or false: adv_norm is true when left out.",
        ),
        lacks("actor.reward_norm.std_unbiased actor.adv_norm.std_unbiased", "a biased deviation", [True]),
        fixed("actor.reward_norm.eps actor.adv_norm.eps", "ε is 1e-6"),
        used(
            "actor.adv_norm.mean_level actor.adv_norm.std_level actor.adv_norm.mean_leave1out",
            "algorithm.whiten algorithm.whiten_by algorithm.advantage",
            "batch and batch: mean 0 and variance 1 over all tokens of the step; group and group: of each prompt's. group "
            "without a deviation takes the mean over the group's tokens, of rewards weighted by lengths: length_weighted.",
        ),
        used(
            "actor.reward_bias actor.reward_scaling actor.reward_clip",
            "algorithm.reward_shift algorithm.reward_scale algorithm.reward_clip",
            "In this order, behind the overlong penalty (actor.py). The bound is 20 by default: without the other two no "
            "reward of a rule is beyond it.",
        ),
        used(
            "actor.discount actor.gae_lambda",
            "algorithm.gamma algorithm.lam algorithm.bootstrap_truncated",
            "With a critic a truncated response continues with its value, as in AReaL, which takes the longest responses of "
            "a rank's batch for truncated (actor.py:201); here they are those that were cut off.",
        ),
        used(
            "actor.kl_ctl actor.kl_estimator",
            "algorithm.kl",
            "0.1 when left out, in the reward, of the old log-probs (actor.py:192): refused without a reference.",
        ),
        used(
            "actor.recompute_logprob actor.use_decoupled_loss actor.behav_imp_weight_cap "
            "actor.behave_imp_weight_cap actor.behave_imp_weight_mode actor.rejection_sampling.* actor.prox_logp_method",
            "algorithm.rollout_correction",
            "Without recompute_logprob the old log-probs are the engine's. What is masked keeps its place in the "
            "denominator (functional.py:459), as here. Until 2026-03 (one string of a layout) the decoupled loss has a "
            "weight without a bound where no cap is said; since 2026-04 it has none without rejection_sampling. "
            "loglinear: (s - 1) / s of the way from the engine's log-probs to those of now, for a token of s steps ago "
            "(actor.py:640).",
        ),
        used(
            "actor.overlong_reward_penalty actor.overlong_tokens actor.overlong_penalty_factor",
            "algorithm.overlong_buffer algorithm.overlong_penalty",
        ),
        used("actor.mask_no_eos_with_zero", "algorithm.overlong_filter"),
        used(
            "actor.dynamic_sampling",
            "algorithm.difficulty_low algorithm.difficulty_by",
            "Until 2026-01: prompts whose responses all have the same reward, penalties of length included, are left out, "
            "and none are sampled in their place. A rank whose prompts are all such keeps them there, in the denominators.",
        ),
        lacks("actor.dynamic_sampling_strategy", "another filter of groups of a branch", ["dynamic"]),
        fixed(
            "dynamic_bs",
            "read with a filter that the program gives (rl_trainer.py:520); without one every prompt is accepted",
        ),
        used(
            "actor.temperature",
            "engine.sampling.temperature",
            "It divides the trainer's logits: the same as gconfig.temperature, as here.",
        ),
        fixed("actor.log_agent_*", SHOWN),
        used(
            "critic.path critic.optimizer critic.optimizer.* critic.eps_clip critic.ppo_n_minibatches",
            "critic.path critic.optimizer critic.value_clip",
        ),
        lacks(
            "critic.dtype ref.dtype",
            "another type of numbers than bfloat16: the policy's is that of all models",
            ["bfloat16"],
        ),
        fixed(
            below(
                "critic.",
                "archon fsdp megatron gradient_checkpointing mask_no_eos_with_zero mb_spec scheduling_spec "
                "scheduling_strategy temperature",
            ),
            "it has the policy's settings",
        ),
        fixed(below("ref.", _OF_REFERENCE), "the reference has the policy's settings, and only computes"),
        fixed(
            (
                *below("ref.adv_norm. ref.reward_norm.", "eps group_size mean_leave1out mean_level std_level std_unbiased"),
                *below("ref.rejection_sampling.", "action agg level lower metric upper"),
                *below("ref.optimizer.", "beta1 beta2 eps gradient_clipping lr lr_scheduler_type min_lr_ratio type"),
                *below("ref.optimizer.", "warmup_steps_proportion weight_decay"),
                *below("ref.scheduling_strategy.", "fork target type"),
            ),
            "the reference learns nothing",
        ),
        lacks("teacher.**", "learning from a teacher"),
    ),
    Section.of(
        "Generation",
        used("gconfig.n_samples", "algorithm.group_size"),
        used(
            "gconfig.max_new_tokens gconfig.max_tokens train_dataset.max_length",
            "data.max_prompt_tokens data.max_response_tokens",
        ),
        used(
            "gconfig.temperature gconfig.top_p gconfig.top_k gconfig.min_new_tokens gconfig.stop_token_ids "
            "gconfig.stop gconfig.ignore_eos gconfig.greedy",
            "engine.sampling",
        ),
        fixed("gconfig.skip_special_tokens gconfig.lora_name", "tokens are scored as they were sampled"),
        lacks("gconfig.frequency_penalty gconfig.use_beam_search", "another way of sampling", [0, 0.0, False]),
        fixed("eval_gconfig eval_gconfig.**", "evaluation is greedy here: eval.samples asks for more"),
        used(
            "sglang.mem_fraction_static vllm.gpu_memory_utilization",
            "engine.memory_fraction",
            "At most 0.6 where the trainer shares the GPUs.",
        ),
        used("vllm.max_num_seqs", "engine.max_num_seqs"),
        used("vllm.enforce_eager", "engine.vllm"),
        lacks("sglang.torchao_config sglang.quantization vllm.quantization", "engines that quantize", [""]),
        lacks("sglang.kv_cache_dtype vllm.kv_cache_dtype vllm.kv_cache_type", "a cache in 8 bits", ["auto"]),
        slower(
            "sglang.speculative_algorithm vllm.speculative_config",
            "speculative decoding: the engine draws each token from the policy",
        ),
        fixed(
            "sglang.speculative_* sglang.enable_draft_weights_cpu_backup",
            "read with speculative_algorithm only",
            takes_any=True,
        ),
        fixed(
            "sglang.enable_deterministic_inference sglang.load_format vllm.enable_expert_parallel vllm.data_parallel_size "
            "vllm.tensor_parallel_size vllm.disable_custom_all_reduce vllm.trust_remote_code vllm.gdn_prefill_backend",
            KERNELS,
        ),
        slower(
            "sglang.cpu_offload_gb vllm.cpu_offload_gb",
            "weights of the engine that wait on the host: engine.vllm has vLLM's own key",
            [0],
        ),
        lacks("sglang.dtype vllm.dtype", "an engine in another type: engine.dtype", ["bfloat16", "auto"]),
        fixed(below("sglang.", _OF_SGLANG), "how SGLang serves: vLLM samples here"),
        fixed(
            below(
                "vllm.",
                "block_size disable_sliding_window distributed_executor_backend enable_chunked_prefill enable_lora "
                "enable_prefix_caching enable_sleep_mode lora_modules max_lora_rank max_loras max_model_len "
                "max_seq_len_to_capture model no_enable_chunked_prefill no_enable_prefix_caching seed skip_tokenizer_init "
                "swap_space uvicorn_log_level worker_extension_cls",
            ),
            "how vLLM serves: the same distribution is sampled",
        ),
    ),
    Section.of(
        "Data and run",
        to(
            "train_dataset.path",
            "data.train",
            files_of("train"),
            "openai/gsm8k is what `fivefold data gsm8k --form areal --out data/gsm8k-areal` writes; another name on the "
            "hub is to be written as parquet first.",
        ),
        to("valid_dataset.path", "data.val", files_of("test")),
        used("train_dataset.batch_size", "data.prompts_per_step"),
        to("train_dataset.shuffle", "data.shuffle", shared.flag),
        fixed(
            "valid_dataset valid_dataset.** ref train_dataset.pin_memory train_dataset.num_workers "
            "train_dataset.num_dataset_workers train_dataset.drop_last train_dataset.setup_timeout "
            "train_dataset.scheduling_spec.**",
            "how data are read",
        ),
        used(
            "max_train_samples",
            "data.train",
            "Of a branch's program (examples/cloud_gsm8k/gsm8k_grpo_train.py): the first rows, `FILE[:N]`.",
        ),
        slower(
            "circuit_breaker_enabled",
            "a run that ends where rewards stay 0: trainer.stop_at ends one that is good enough",
            [False],
        ),
        fixed("circuit_breaker_threshold training_mode", "of that program: a name, and how many steps it waits"),
        lacks("train_dataset.split", "another part of a data set of the hub", ["train"]),
        used("train_dataset.type", "algorithm.name", "sft, rl or dpo; rw, the training of reward models, is refused."),
        lacks("defaults", "a file that is composed of others: give it as the program sees it"),
        lacks("train_dataset.dataset_kwargs train_dataset.dataset_kwargs.**", "arguments of a data set's code"),
        used("seed", "trainer.seed"),
        used("experiment_name trial_name cluster.fileroot", "trainer.run_dir tracking.project tracking.name"),
        used("stats_logger.wandb.mode stats_logger.swanlab.mode", "trainer.loggers tracking.offline"),
        used("stats_logger.tensorboard.path", "trainer.loggers"),
        used("stats_logger.*.project stats_logger.*.name stats_logger.wandb.group stats_logger.wandb.tags", "tracking"),
        fixed("stats_logger.*.api_key", "the tracker's own variable has the key: none stands in our files"),
        used(
            "saver.freq_steps saver.freq_epochs recover.freq_steps recover.freq_epochs",
            "trainer.save_every",
            "A checkpoint is for both, export and resumption: recover's interval counts where saver has none.",
        ),
        used("evaluator.freq_steps evaluator.freq_epochs", "trainer.eval_every"),
        used("evaluator.eval_before_train", "trainer.eval_before_train"),
        used("recover.mode", "trainer.resume"),
        lacks("recover.no_load_optim", "a run that goes on with a new optimizer", [False]),
        slower("recover.no_save_optim", "checkpoints without the optimizer's state", [False]),
        slower(
            "recover.freq_secs saver.freq_secs evaluator.freq_secs",
            "seconds between checkpoints and evaluations: say freq_steps",
        ),
        fixed(
            "saver.mode saver.fileroot evaluator.fileroot recover.fileroot recover.retries *.experiment_name "
            "*.trial_name stats_logger.** perf_tracer perf_tracer.** memory_profiler memory_profiler.**",
            SHOWN,
        ),
        fixed(
            "checkpointer.* server_only perf_tracer.*.* *.mb_spec.max_tokens_per_gpu",
            "of older releases: when states are written, how much is computed at once",
            takes_any=True,
        ),
        slower("*.fsdp.ulysses_sp_size", "an older name of the layout's c", [1]),
        fixed("-m --config-name --config-path", "how the program is started"),
    ),
)
