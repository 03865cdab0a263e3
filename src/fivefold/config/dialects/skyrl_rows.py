"""The rows of SkyRL's table: what becomes of each key, in the order in which its users think.

Numbers that only SkyRL's code explains were read in SkyRL a9564572e (2026-08-21); a note has the place.
"""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.shared import KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.table import Section, below, fixed, lacks, slower, to, used

_ALGORITHM, _POLICY, _MEGATRON = "trainer.algorithm.", "trainer.policy.", "trainer.policy.megatron_config."
_ENGINE = "generator.inference_engine."
OLDER = {
    "backend": "backend",
    "num_engines": "num_inference_engines",
    "tensor_parallel_size": "inference_engine_tensor_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "enforce_eager": "enforce_eager",
    "async_engine": "async_engine",
    "run_engines_locally": "run_engines_locally",
    "weight_sync_backend": "weight_sync_backend",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "model_dtype": "model_dtype",
    "expert_parallel_size": "inference_engine_expert_parallel_size",
    "data_parallel_size": "inference_engine_data_parallel_size",
    "pipeline_parallel_size": "inference_engine_pipeline_parallel_size",
    "vllm_v1_disable_multiproc": "vllm_v1_disable_multiproc",
    "weight_transfer_threshold_cuda_ipc_GB": "weight_transfer_threshold_cuda_ipc_GB",
    "engine_init_kwargs": "engine_init_kwargs",
}
"""Keys under generator.inference_engine -> under generator, as they were until 2026."""

_TOOLS = "tools and several turns"


def _engines(names: str) -> str:
    """Names of engine settings -> their keys, of today and of before."""
    return " ".join(f"{_ENGINE}{name} generator.{OLDER.get(name, name)}" for name in names.split())


_OF_FSDP = "fsdp_size mixed_precision reshard_after_forward wrap_policy"
_REFERENCE = "of a learner: the reference only computes"
_OF_MEGATRON = (
    "async_dist_ckpt_save async_dist_ckpt_strategy async_save_prestage_to_cpu context_parallel_size ddp_config "
    "ddp_config.average_in_collective dist_ckpt_optim_fully_reshardable empty_cuda_cache expert_model_parallel_size "
    "expert_tensor_parallel_size freeze_moe_router hf_export_config hf_export_config.distributed_save "
    "hf_export_config.save_every_n_ranks lora_config lora_config.lora_type lora_config.merge_lora model_config_kwargs "
    "moe_enable_routing_replay moe_grouped_gemm moe_per_layer_logging moe_router_enable_expert_bias "
    "moe_router_load_balancing_type moe_router_score_function moe_token_dispatcher_type mtp_loss_chunk_size mtp_loss_topk "
    "mtp_loss_weight mtp_num_layers optimizer_config_kwargs pipeline_model_parallel_size tensor_model_parallel_size "
    "transformer_config_kwargs"
)
_DEEPSPEED = "deepspeed_config.*.zero_optimization."
SAID = (
    *slower(
        "trainer.*.fsdp_config.cpu_offload fsdp_config.cpu_offload",
        "state that waits on the host: policy.offload moves the policy's, and with it the reference's",
        [False],
    ),
    *slower(
        below(
            "trainer.*.megatron_config.ddp_config. megatron_config.policy.ddp_config. megatron_config.ddp_config.",
            "overlap_grad_reduce overlap_param_gather",
        ),
        "communication that is hidden: policy.megatron.ddp has it",
        [False],
    ),
    *lacks(
        below(
            "trainer.policy.megatron_config.ddp_config. megatron_config.policy.ddp_config. megatron_config.ddp_config.",
            "grad_reduce_in_fp32",
        ),
        "gradients that are summed in 16 bits: policy.megatron.ddp has it",
        [True],
    ),
    *fixed(
        below("trainer.ref.", "megatron_config.ddp_config.grad_reduce_in_fp32 megatron_config.moe_aux_loss_coeff"),
        _REFERENCE,
    ),
    *fixed("trainer.ref.model.lora.dropout", "a reference has no adapters"),
    *lacks(
        below(
            "trainer.*.fsdp_config.mixed_precision. fsdp_config.mixed_precision.", "buffer_dtype param_dtype reduce_dtype"
        ),
        "types of single parts of the computation",
        ["bf16", "bfloat16", "fp32", "float32"],
    ),
    *lacks("trainer.ref.megatron_config.moe_router_dtype", "routers that compute in another type", ["fp32"]),
    *lacks("trainer.*.model.fake_int4_qat.enabled", "training for a quantized model", [False]),
    *slower(
        (*below(_DEEPSPEED, "offload_param offload_optimizer"), *below(_DEEPSPEED, "offload_param.* offload_optimizer.*")),
        "state that waits on the host: policy.offload",
        [False, "none"],
    ),
    *lacks(below(_DEEPSPEED, "zero_quantized_gradients zero_quantized_weights"), "sums and weights in few bits", [False]),
    *lacks("deepspeed_config.*.data_types.grad_accum_dtype", "gradients that are summed in 16 bits", ["fp32", "float32"]),
)
"""What costs time or memory here, with a line where it is on, and what is refused, of every model."""
SECTIONS = (
    Section.of("Memory and communication", *SAID),
    Section.of(
        "Algorithm",
        used(
            _ALGORITHM + "advantage_estimator", "algorithm.name algorithm.advantage algorithm.credit", "grpo when left out."
        ),
        used(_ALGORITHM + "grpo_norm_by_std", "algorithm.normalize"),
        used(f"{_ALGORITHM}gamma {_ALGORITHM}lambd", "algorithm.gamma algorithm.lam"),
        used(
            _ALGORITHM + "policy_loss_type",
            "algorithm.surrogate algorithm.importance_sampling_level",
            "dual_clip is the only one with clip_ratio_c. reinforce of SkyRL's example is the mean of A log π over the "
            "padded batch, whose width is the longest response there is and not the longest allowed: the same where one "
            "reaches it. Since 2026-03-31 its advantages are divided twice, and it is refused.",
        ),
        used(
            f"{_ALGORITHM}eps_clip_low {_ALGORITHM}eps_clip_high {_ALGORITHM}cispo.*",
            "algorithm.clip_low algorithm.clip_high",
        ),
        used(_ALGORITHM + "clip_ratio_c", "algorithm.dual_clip"),
        used(
            f"{_ALGORITHM}dppo.dppo_type {_ALGORITHM}dppo.delta_low {_ALGORITHM}dppo.delta_high",
            "algorithm.divergence algorithm.clip_low algorithm.clip_high",
        ),
        used(f"{_ALGORITHM}sapo.*", "algorithm.temperature_positive algorithm.temperature_negative"),
        used(
            f"{_ALGORITHM}clip_cov.* {_ALGORITHM}kl_cov.*",
            "algorithm.cov_fraction algorithm.cov_low algorithm.cov_high algorithm.cov_kl_coef",
        ),
        used(
            _ALGORITHM + "loss_reduction",
            "algorithm.aggregate",
            "token_mean counts the tokens of the whole update since 2026-03-31 (#1296), and of a micro-batch before, as "
            "token_mean_legacy does still: which it was is known by `--from skyrl@2026-03` and by keys that no later "
            "release has. With one sequence a micro-batch that is seq-mean-token-mean; others are cut by tokens here "
            "(`micro-batch-token-mean`), and beside a KL in the loss, a mean over sequences, it is token-mean.",
        ),
        used(
            _ALGORITHM + "max_seq_len",
            "algorithm.aggregate algorithm.kl policy.optimizer.clip_grad",
            "What seq_mean_token_sum_norm divides by; prompt and response when left out, as until 2026-03. constant-length "
            "divides by the longest response: the KL's coefficient and max_grad_norm are as many times as large, so that "
            "AdamW's updates are the same.",
        ),
        used(
            f"{_ALGORITHM}use_kl_loss {_ALGORITHM}use_kl_in_reward {_ALGORITHM}kl_loss_coef "
            f"{_ALGORITHM}kl_estimator_type {_ALGORITHM}kl_ctrl.*",
            "algorithm.kl algorithm.penalty_aggregate",
            "On when left out, with 0.001 and k3. The KL of the loss is a mean over sequences whatever "
            "loss_reduction says (worker.py:1077), "
            "so penalty_aggregate is seq-mean-token-mean. kl_loss_coef is the coefficient in the reward too.",
        ),
        used(f"{_ALGORITHM}use_entropy_loss", "algorithm.entropy_coef"),
        fixed(_ALGORITHM + "entropy_loss_coef", "read with use_entropy_loss only"),
        used(
            f"{_ALGORITHM}use_tis {_ALGORITHM}tis_imp_ratio_cap {_ALGORITHM}off_policy_correction.tis_ratio_type "
            f"{_ALGORITHM}off_policy_correction.token_tis_ratio_clip_high "
            f"{_ALGORITHM}off_policy_correction.sequence_tis_ratio_clip_high "
            f"{_ALGORITHM}off_policy_correction.sequence_mask_metric {_ALGORITHM}off_policy_correction.geo_mask_* "
            f"{_ALGORITHM}off_policy_correction.product_mask_* {_ALGORITHM}rollout_correction.tis_ratio_type "
            f"{_ALGORITHM}rollout_correction.token_tis_ratio_cap_high "
            f"{_ALGORITHM}rollout_correction.sequence_tis_ratio_cap_high "
            f"{_ALGORITHM}rollout_correction.sequence_mask_metric",
            "algorithm.rollout_correction",
            "What is masked keeps its place in the denominators, as here: advantages are divided before "
            "(ppo_utils.py:1152).",
        ),
        lacks(f"{_ALGORITHM}off_policy_correction.* {_ALGORITHM}rollout_correction.*", "masks of outlying tokens"),
        used(
            f"{_ALGORITHM}dynamic_sampling.type {_ALGORITHM}dynamic_sampling.max_sample_batches",
            "algorithm.dynamic_sampling algorithm.dynamic_sampling_by algorithm.sampling_rounds",
            "With DAPO's penalty rewards are compared behind it.",
        ),
        fixed(_ALGORITHM + "dynamic_sampling.min_replace_ratio", "read with type=replace only"),
        used(
            f"{_ALGORITHM}overlong_buffer_len {_ALGORITHM}overlong_buffer_penalty_factor {_ALGORITHM}overlong_buffer.len "
            f"{_ALGORITHM}overlong_buffer.penalty_factor",
            "algorithm.overlong_buffer algorithm.overlong_penalty",
            "In the recipe DAPO, whose program applies it.",
        ),
        used("generator.apply_overlong_filtering", "algorithm.overlong_filter"),
        lacks(
            f"{_ALGORITHM}zero_variance_filter {_ALGORITHM}advantage_batch_normalize",
            "another treatment of groups of equal rewards",
            [False],
        ),
        fixed(
            f"{_ALGORITHM}zero_variance_filter_tol {_ALGORITHM}value_head_prefix",
            "read by what is not supported only",
        ),
        lacks(_ALGORITHM + "ppo_loss_type", "the name of 2025: trainer.algorithm.policy_loss_type"),
        lacks(
            f"{_ALGORITHM}repo.enabled {_ALGORITHM}adaptive_prompt_filtering.enabled {_ALGORITHM}fold_grpo.enabled",
            "a method of a fork",
            [False],
        ),
        fixed(
            f"{_ALGORITHM}repo.* {_ALGORITHM}adaptive_prompt_filtering.* {_ALGORITHM}fold_grpo.*",
            "read by a fork's method only",
            takes_any=True,
        ),
        lacks(f"{_ALGORITHM}temperature", "another temperature of the trainer's log-probs"),
        to("trainer.update_epochs_per_batch", "algorithm.ppo_epochs", shared.whole),
        to("generator.n_samples_per_prompt", "algorithm.group_size", shared.whole),
    ),
    Section.of(
        "Data and reward",
        to("data.train_data", "data.train", shared.files),
        to("data.val_data", "data.val", shared.files),
        fixed("data.dataloader.*", "how data are read"),
        used(
            "trainer.train_batch_size trainer.policy_mini_batch_size",
            "data.prompts_per_step algorithm.updates_per_step",
            "Both count prompts.",
        ),
        to("trainer.max_prompt_length", "data.max_prompt_tokens", shared.whole, "Longer prompts are dropped, as there."),
        to("generator.sampling_params.max_generate_length", "data.max_response_tokens", shared.whole),
        used(
            "environment.env_class",
            "reward.functions data.ground_truth_key",
            "aime scores -1 and 1: 0 and 2 here, of which a group's mean takes the constant away. lcb is LiveCodeBench's "
            "programs and tests: code.",
        ),
        fixed("environment.skyrl_gym.**", "read by other environments only"),
        lacks("data.max_num_examples", "the first rows of the data: `train.parquet[:100]` names them"),
        lacks("dspy.**", "DSPy's programs, which are agents"),
        lacks("generator.chat_template.name_or_path", "another chat template"),
        used(
            "generator.chat_template_kwargs generator.chat_template_kwargs.**",
            "data.chat_template_kwargs",
            takes_any=True,
        ),
        fixed("generator.chat_template.source", "read with name_or_path only"),
    ),
    Section.of(
        "Policy",
        to("trainer.policy.model.path", "model.path", shared.path),
        used("trainer.strategy", "policy.backend", "fsdp and fsdp2 become data-parallel Megatron-Core on as many GPUs."),
        used(
            "trainer.placement.policy_num_nodes trainer.placement.policy_num_gpus_per_node "
            "trainer.policy.sequence_parallel_size "
            + " ".join(
                f"{_MEGATRON}{name}_parallel_size"
                for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
            )
            + " megatron_config.policy.*_parallel_size",
            "policy.backend",
            "megatron_config beside trainer is of 2025-08 to 2025-10.",
            takes_any=True,
        ),
        lacks("trainer.policy.fsdp_config.context_parallel_size", "context parallelism of a fork's FSDP", [1]),
        fixed("trainer.policy.fsdp_config.cp_* trainer.policy.fsdp_config.wrap_policy.**", SPREAD, takes_any=True),
        used(
            "trainer.placement.colocate_all",
            "engine.placement engine.backend policy.offload.optimizer",
            "False: engines on GPUs of their own, behind the policy's.",
        ),
        fixed(
            "trainer.placement.colocate_policy_ref trainer.placement.ref_num_* "
            "trainer.placement.critic_num_* trainer.placement.reward_num_*",
            "all models share the policy's GPUs",
        ),
        used("trainer.gradient_checkpointing", "policy.recompute"),
        fixed("trainer.gradient_checkpointing_use_reentrant", KERNELS),
        used(
            f"{_MEGATRON}transformer_config_kwargs.* megatron_config.policy.transformer_config_kwargs.*",
            "policy.recompute policy.megatron.transformer policy.megatron.pipeline",
            takes_any=True,
        ),
        used(
            f"{_MEGATRON}optimizer_config_kwargs.* megatron_config.policy.optimizer_config_kwargs.*",
            "policy.megatron.optimizer",
        ),
        lacks(f"{_MEGATRON}fp8 {_MEGATRON}fp8_param", "training in 8 bits", [False]),
        fixed(
            f"{_MEGATRON}fp8_* {_MEGATRON}ddp_config.fp8_param_gather trainer.ref.megatron_config.fp8* "
            "trainer.ref.megatron_config.ddp_config.fp8_param_gather",
            "read with fp8 only",
            takes_any=True,
        ),
        lacks(
            f"{_MEGATRON}lora_config.experts_shared_outer_loras trainer.policy.model.lora.share_expert_adapters",
            "adapters that experts share",
            [False],
        ),
        lacks(_MEGATRON + "lora_config.normalize_moe_lora", "adapters of experts of another scale", [False]),
        fixed(
            below(
                "megatron_config.ref.",
                "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size model_config_kwargs "
                "pipeline_model_parallel_size tensor_model_parallel_size transformer_config_kwargs "
                "transformer_config_kwargs.recompute_granularity transformer_config_kwargs.recompute_method "
                "transformer_config_kwargs.recompute_modules transformer_config_kwargs.recompute_num_layers",
            ),
            "the reference has the policy's layout, and only computes",
        ),
        fixed("megatron_config.ref.model_config_kwargs.**", "of the reference's model, whose config.json says it"),
        fixed(
            "megatron_config.policy.ddp_config.average_in_collective megatron_config.policy.empty_cuda_cache",
            SPREAD,
            takes_any=True,
        ),
        fixed(
            f"{_MEGATRON}transformer_config_kwargs {_MEGATRON}optimizer_config_kwargs "
            f"{_MEGATRON}model_config_kwargs trainer.policy.model_config_kwargs",
            "empty",
        ),
        to(
            _MEGATRON + "moe_router_dtype",
            "policy.megatron.transformer.moe_router_dtype",
            lambda s, k: s.text(k) if (s.whole(_MEGATRON + "expert_model_parallel_size") or 1) > 1 else None,
        ),
        lacks(_MEGATRON + "moe_router_load_balancing_type", "balancing of experts by loss", ["none"]),
        lacks(_MEGATRON + "moe_aux_loss_coeff", "balancing of experts by loss", [0, 0.0]),
        used(
            f"{_MEGATRON}moe_enable_routing_replay {_ENGINE}enable_return_routed_experts",
            "policy.router_replay engine.mode",
            "R3, by Megatron, with servers; SkyRL refuses one without the other.",
        ),
        lacks(_MEGATRON + "freeze_moe_router", "a router that does not learn", [False]),
        slower(
            [f"{_MEGATRON}mtp_num_layers", "trainer.mtp.enabled"],
            "layers of multi-token prediction that draft for the engine: they learn from the policy's own distribution, "
            "behind detached hidden states, embeddings and output layer, and are clipped by themselves, so the policy "
            "learns the same without them (mtp/grad_clip.py); they stay as they are",
            [False, 0],
        ),
        fixed(f"{_MEGATRON}mtp_* trainer.mtp.*", "read with trainer.mtp.enabled only"),
        fixed(
            f"{_MEGATRON}moe_router_score_function {_MEGATRON}moe_router_enable_expert_bias",
            "it comes from the model's config.json",
        ),
        fixed(
            (
                *below(
                    _MEGATRON, "ddp_config.average_in_collective empty_cuda_cache moe_grouped_gemm moe_per_layer_logging"
                ),
                *below(_MEGATRON, "hf_export_config.distributed_save hf_export_config.save_every_n_ranks"),
                *below(_MEGATRON, "moe_token_dispatcher_type dist_ckpt_optim_fully_reshardable async_dist_ckpt_save"),
                *below(_MEGATRON, "async_dist_ckpt_strategy async_save_prestage_to_cpu lora_config.merge_lora"),
            ),
            SPREAD,
        ),
        fixed(_MEGATRON + "torch_profiler_config.*", SHOWN),
        fixed(
            below("trainer.policy.fsdp_config.", "fsdp_size mixed_precision reshard_after_forward wrap_policy"),
            "how FSDP shards: the sums are those of data-parallel Megatron-Core",
        ),
        fixed(
            "trainer.policy.use_torch_compile "
            "trainer.policy.language_model_only trainer.sequence_parallel_backend "
            "trainer.use_expandable_segments trainer.flash_attn trainer.remove_microbatch_padding "
            "trainer.use_sample_packing trainer.fused_lm_head_logprob trainer.fused_lm_head_logprob_backend "
            "trainer.logprobs_chunk_size trainer.vocab_entropy_chunk_memory_mb "
            "trainer.vocab_entropy_chunk_size trainer.policy.inference_only_init",
            KERNELS,
        ),
        lacks("trainer.bf16", "training in float32: policy.dtype", [True]),
        lacks("trainer.disable_fast_tokenizer", "the slow tokenizer", [False]),
        used(
            "trainer.micro_train_batch_size_per_gpu trainer.max_tokens_per_microbatch",
            "policy.tokens_per_micro_batch",
            "Sequences at their longest, or a token budget.",
        ),
        fixed(
            "trainer.micro_forward_batch_size_per_gpu trainer.recompute_old_logprobs_per_minibatch",
            "no cut changes log-probs",
        ),
        used(f"{_POLICY}optimizer_config.lr", "policy.optimizer.lr"),
        used(f"{_POLICY}optimizer_config.adam_betas", "policy.optimizer.betas"),
        used(f"{_POLICY}optimizer_config.weight_decay", "policy.optimizer.weight_decay"),
        used(f"{_POLICY}optimizer_config.max_grad_norm", "policy.optimizer.clip_grad"),
        used(
            f"{_POLICY}optimizer_config.num_warmup_steps",
            "policy.optimizer.warmup_steps",
            "Optimizer steps, the first with rate 0, as torch's schedulers: warmup_from: 0.",
        ),
        used(f"{_POLICY}optimizer_config.scheduler", "policy.optimizer.schedule"),
        used(f"{_POLICY}optimizer_config.offload_after_step", "policy.offload.optimizer"),
        *(
            used(f"trainer.{role}.model.lora.{theirs}", f"{role}.lora.{ours}", note)
            for role in ("policy", "critic")
            for theirs, ours, note in (
                ("rank", "rank", ""),
                ("alpha", "alpha", "Over the rank, the factor of B A."),
                ("target_modules", "target_modules", ""),
                ("exclude_modules", "exclude_modules", ""),
                ("init_method", "init", ""),
                ("dropout", "rank", "Another one than 0 is refused."),
            )
        ),
        used(f"{_MEGATRON}lora_config.lora_type", "policy.lora.rank", "Others than lora and canonical_lora are refused."),
        lacks("trainer.ref.model.lora.rank", "a reference with adapters: it is the model without them", [0]),
        fixed(
            below("trainer.*.model.lora.", "lora_sync_path max_cpu_loras max_loras"),
            "how adapters reach the engine: it is given the merged weights",
        ),
        fixed(
            below("trainer.*.model.fake_int4_qat.", "bf16_base_path group_size q_min scale_divisor symmetric"),
            "read with enabled only",
        ),
    ),
    Section.of(
        "Critic and reference",
        used(
            "trainer.critic.model.path trainer.critic.optimizer_config.* trainer.critic_mini_batch_size "
            + _ALGORITHM
            + "value_clip",
            "critic.path critic.optimizer critic.value_clip",
            "With advantage_estimator=gae.",
        ),
        fixed(
            (
                *below("trainer.critic.", "deepspeed_config fsdp_config model model_config_kwargs optimizer_config"),
                "trainer.critic.sequence_parallel_size",
                *below("trainer.critic.fsdp_config.", _OF_FSDP),
                *below("trainer.critic.model.", "fake_int4_qat lora"),
            ),
            "it has the policy's layout",
        ),
        lacks("trainer.critic.model_config_kwargs.** trainer.ref.model_config_kwargs.**", "changes of config.json"),
        to(
            "trainer.ref.model.path",
            "reference.path",
            lambda s, k: shared.path(s, k) if s.flag(_ALGORITHM + "use_kl_loss") else None,
        ),
        fixed(
            (
                *below("trainer.ref.", "deepspeed_config fsdp_config language_model_only megatron_config model"),
                *below("trainer.ref.", "model_config_kwargs sequence_parallel_size"),
                *below("trainer.ref.fsdp_config.", _OF_FSDP),
                *below("trainer.ref.model.", "fake_int4_qat lora lora.alpha lora.exclude_modules lora.init_method"),
                *below("trainer.ref.model.lora.", "lora_sync_path max_cpu_loras max_loras target_modules"),
                *below("trainer.ref.megatron_config.", _OF_MEGATRON),
            ),
            "the reference has the policy's layout, and only computes",
        ),
        fixed("trainer.ref.megatron_config.*_kwargs.**", _REFERENCE),
        fixed("trainer.ref.megatron_config.torch_profiler_config.**", SHOWN),
        lacks("trainer.update_ref_every_epoch", "a reference that moves", [False]),
    ),
    Section.of(
        "Generator",
        used(_engines("backend"), "engine.backend", "sglang becomes vLLM: the same distribution."),
        used(
            _engines("num_engines tensor_parallel_size expert_parallel_size data_parallel_size pipeline_parallel_size"),
            "engine.backend",
        ),
        used(_engines("gpu_memory_utilization"), "engine.memory_fraction"),
        used(_engines("max_num_seqs"), "engine.max_num_seqs"),
        used(_engines("enforce_eager enable_prefix_caching enable_chunked_prefill max_num_batched_tokens"), "engine.vllm"),
        used(
            _engines("run_engines_locally")
            + f" {_ENGINE}external_server_urls {_ENGINE}remote_urls generator.remote_inference_engine_urls",
            "engine.url engine.backend",
            "Servers that run already, started by fivefold.engines.vllm.serve in the place of SkyRL's: docs/engines.md. "
            "Their layout and memory are said there.",
        ),
        fixed(_ENGINE + "external_proxy_url", "requests go to the servers themselves"),
        fixed(
            _engines(
                "async_engine weight_sync_backend vllm_v1_disable_multiproc "
                "weight_transfer_threshold_cuda_ipc_GB model_dtype "
                "distributed_executor_backend language_model_only offload_kv_for_weight_sync "
                "use_expandable_segments enable_ray_prometheus_stats "
                "served_model_name fully_sharded_loras"
            )
            + f" {_ENGINE}delta_weight_sync {_ENGINE}delta_weight_sync.* {_ENGINE}serialized_weight_sync_mode",
            "the engine is given the whole weights",
            takes_any=True,
        ),
        lacks(_ENGINE + "fp8_weight_sync_mode", "an engine that is given weights in 8 bits: engine.vllm.quantization"),
        fixed(
            f"{_ENGINE}router_type generator.use_http_server_inference_engine_client "
            "generator.http_server_inference_engine_client_*",
            "how requests reach the engine",
            takes_any=True,
        ),
        lacks("generator.enable_thinking_tokens", "another chat template: data.chat_template_kwargs", [False]),
        slower(
            _engines("engine_init_kwargs") + f" {_ENGINE}engine_init_kwargs.** generator.engine_init_kwargs.**",
            "engine.vllm takes vLLM's own arguments: these are not carried over",
        ),
        slower(_ENGINE + "speculative_config", "speculative decoding"),
        slower(_ENGINE + "enable_pd", "prefill and decoding on different GPUs: every engine does both", [False]),
        fixed(f"{_ENGINE}num_prefill {_ENGINE}router_init_kwargs", "read with enable_pd only"),
        used(
            " ".join(
                f"generator.sampling_params.{name}"
                for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
            ),
            "engine.sampling",
        ),
        fixed("generator.sampling_params.logprobs generator.sampling_params.get_logprobs", "log-probs are always recorded"),
        lacks("generator.sampling_params.additional_kwargs", "further arguments of sampling"),
        used(
            "generator.eval_sampling_params.temperature generator.eval_sampling_params.top_p "
            "generator.eval_sampling_params.max_generate_length "
            "generator.eval_n_samples_per_prompt",
            "eval",
            "Greedy where no temperature is said. A greedy evaluation is always made too.",
        ),
        lacks(
            "generator.eval_sampling_params.top_k generator.eval_sampling_params.min_p",
            "cuts of the distribution in evaluation",
            [-1, 0, 0.0],
        ),
        lacks(
            "generator.eval_sampling_params.stop generator.eval_sampling_params.additional_kwargs",
            "stop strings of evaluation alone",
        ),
        slower("generator.eval_sampling_params.repetition_penalty", "another way of sampling in evaluation", [1, 1.0]),
        fixed("generator.eval_sampling_params.logprobs generator.eval_sampling_params", "log-probs are always recorded"),
        fixed(
            "generator.batched generator.use_conversation_multi_turn "
            "generator.append_eos_token_after_stop_str_in_multi_turn generator.use_cache_salt",
            "one turn is sampled token by token",
        ),
        lacks("generator.max_turns", _TOOLS, [1]),
        used(
            "generator.max_input_length", "algorithm.aggregate", "A limit of prompts in later turns; max_seq_len has it too."
        ),
        lacks(
            "generator.zero_reward_on_non_stop generator.step_wise_trajectories "
            "generator.vision_language_generator generator.merge_stepwise_output",
            _TOOLS,
            [False],
        ),
        used(
            "trainer.fully_async.enabled trainer.fully_async.max_staleness_steps",
            "rollout",
            "With main_fully_async, 4 when left out: the same number and the same rule, (k + v + 1) x "
            "policy_mini_batch_size prompts given out when v steps are done (fully_async_trainer.py:184). Responses go "
            "on under new weights, and a step takes what is complete: interrupt: continue and tail: carry. SkyRL begins "
            "each epoch anew, and uses what is older than k with a warning; here nothing waits for an epoch's end, and such "
            "a prompt is sampled again. main_async is one step ahead, with interrupt: finish: there the first step of each "
            "epoch is not.",
        ),
        used(
            "trainer.fully_async.num_parallel_generation_workers",
            "engine.max_num_seqs",
            "Prompts in flight at once, 768 when left out: samples of each replica here, where that is less than what may "
            "be given out.",
        ),
        lacks(
            "trainer.fully_async.sample_full_batch trainer.fully_async.simulate_training",
            "groups without variance that are left out, or training that is only simulated",
            [False],
        ),
        fixed("trainer.fully_async.simulate_*", "read with simulate_training only"),
        fixed(
            "trainer.fully_async.clear_kv_cache_on_weight_sync "
            "trainer.fully_async.preserve_inflight_kv_cache_on_weight_update",
            "as if it were true: keys and values of a response that goes on are computed anew by the new weights",
        ),
    ),
    Section.of(
        "Trainer",
        used("trainer.epochs", "trainer.epochs"),
        used("trainer.max_training_steps", "trainer.steps"),
        to("trainer.ckpt_interval", "trainer.save_every", shared.interval),
        used("trainer.eval_interval", "trainer.eval_every"),
        to("trainer.eval_before_train", "trainer.eval_before_train", shared.flag),
        fixed("trainer.eval_batch_size", "all prompts are evaluated"),
        used("trainer.resume_mode trainer.resume_path", "trainer.resume"),
        used("trainer.max_ckpts_to_keep", "trainer.keep"),
        used("trainer.ckpt_path trainer.run_name", "trainer.run_dir tracking.name"),
        used("trainer.project_name trainer.tags", "tracking.project tracking.tags"),
        to("trainer.seed", "trainer.seed", shared.whole),
        to(
            "trainer.logger",
            "trainer.loggers",
            shared.loggers,
            "A tracker of the default has to be said.",
        ),
        slower("trainer.hf_save_interval", "`fivefold export` writes a checkpoint in Hugging Face's form", [-1, 0]),
        fixed(
            "trainer.export_path trainer.log_path "
            "trainer.enable_ray_gpu_monitor trainer.dump_* trainer.print_example_interval "
            "trainer.num_logger_* trainer.log_example_interval trainer.policy.record_memory "
            "trainer.policy.torch_profiler_config.*",
            SHOWN,
        ),
        fixed(
            "trainer.placement.colocate_critic_reward trainer.*.deepspeed_config "
            "generator.enable_http_endpoint generator.http_endpoint_host "
            "generator.http_endpoint_port generator.override_existing_update_group "
            "generator.model_name use_torch_compile record_memory enable_ray_gpu_monitor model_config_kwargs",
            SPREAD,
        ),
        fixed("torch_profiler_config.*", SHOWN),
        fixed("deepspeed_config.**", "DeepSpeed becomes data-parallel Megatron-Core, which shards the optimizer"),
        lacks("trainer.reward.model.path", "a reward model of 2025: reward.model here"),
        fixed("trainer.reward.**", "a reward model next to the environment's rewards, which no later release has"),
        lacks("trainer.rope_scaling trainer.rope_theta generator.rope_scaling generator.rope_theta", "another RoPE"),
        lacks("trainer.algorithm.use_kl_estimator_k3", "the name of 2025: trainer.algorithm.kl_estimator_type", [True]),
        lacks(
            "trainer.algorithm.use_abs_kl trainer.algorithm.normalize_reward trainer.use_orm_score", "keys of 2025", [False]
        ),
        lacks("trainer.num_dummy_steps trainer.override_entrypoint trainer.arctic_rl.**", "another program's key"),
        lacks("trainer.fireworks.**", "training and engines of a service, which has its own numbers"),
        used(
            "-m",
            "algorithm.name rollout engine.vllm.quantization",
            "main_base, main_async, main_fully_async, "
            "DAPO's main_dapo, and the examples of a loss and an advantage of one's own, under their names. The engines of "
            "main_dapo_flashrl quantize the policy's weights in 8 bits as FLASHRL_CONFIG says, which is no key: fp8 here, "
            "which vLLM makes of the weights as they come, as FlashRL's fp8_vllm; its int8 takes scales from a file, which "
            "vLLM cannot for weights that change. Log-probs are the engine's own in every case, and the correction weighs "
            "by them.",
        ),
        fixed("--config-name --config-path", "how the program is started"),
    ),
)
