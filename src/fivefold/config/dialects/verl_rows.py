"""The rows of verl's table: what becomes of each key, in the order in which its users think.

What a note says of verl's code was read in verl b178a3cd (2026-01-29).
"""

from __future__ import annotations

from fivefold.config.dialects import mtp, shared, verl_prime
from fivefold.config.dialects.adapters import rows_of_verl
from fivefold.config.dialects.shared import KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.table import Section, fixed, lacks, slower, to, used
from fivefold.config.dialects.verl_older import FIRST_ROWS
from fivefold.config.dialects.verl_older import SECTION as OLDER

_A, _R, _M, _C = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model.", "critic."
_TRAINERS = (_A, _C, "actor_rollout_ref.ref.", "reward_model.")
_OF_POLICY = "it has the policy's layout and options"
_ASYNC = (
    "sampling while the policy learns (asynchronous training), of another program than one_step_off_policy and "
    "fully_async_policy"
)
_STORE = "how rollouts are stored between sampling and training"
VALIDATION_ROWS = "The first rows of each file; verl draws them at random where data.shuffle is set, over all files."
_NOT_TEXT = "images, videos and audio"
_TOOLS = "tools and several turns"

SECTIONS = (
    Section.of(
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
            "Groups whose responses all have the same reward. After the last round verl ends the run, here "
            "what is missing is "
            "filled up with such groups.",
        ),
        fixed("algorithm.filter_groups.max_inflight_gen_batches", "rounds follow each other: the same groups are kept"),
        used(
            "data.gen_batch_size",
            "algorithm.prompts_per_round",
            "Of dynamic sampling; without it verl reads the same key for nothing.",
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
    ),
    Section.of(
        "Data",
        to("data.train_files", "data.train", shared.files),
        to("data.val_files", "data.val", shared.files),
        used(
            f"data.train_batch_size {_A}ppo_mini_batch_size",
            "data.prompts_per_step algorithm.updates_per_step",
            "Both count prompts: verl multiplies the mini-batch by rollout.n itself.",
        ),
        to("data.max_prompt_length", "data.max_prompt_tokens", shared.whole),
        to("data.max_response_length", "data.max_response_tokens", shared.whole),
        to("data.prompt_key", "data.prompt_key", shared.text),
        to("data.shuffle", "data.shuffle", shared.flag),
        to("data.seed", "trainer.seed", shared.whole, "The order of prompts is another: each system has its own shuffle."),
        used(
            "data.filter_overlong_prompts data.truncation",
            "data.overlong_prompts",
            "Unfiltered prompts that are too long are refused: none is cut off silently.",
        ),
        fixed("data.reward_fn_key", "data_source is read"),
        fixed(
            (
                "data.val_batch_size data.dataloader_num_workers data.filter_overlong_prompts_workers "
                "data.num_workers data.use_shm data.return_raw_input_ids data.return_full_prompt "
                "data.return_multi_modal_inputs data.validation_shuffle data.image_key data.video_key "
                "data.audio_key data.image_patch_size data.cache_dir data.serialize_dataset "
                "data.ignore_input_ids_mismatch"
            ),
            "how data are read: the same prompts come out",
        ),
        fixed("data.return_raw_chat", "the chat template is applied here"),
        used("data.train_max_samples", "data.train", FIRST_ROWS),
        used("data.val_max_samples", "eval.max_prompts", VALIDATION_ROWS),
        used(
            "data.apply_chat_template_kwargs.* data.apply_chat_template_kwargs", "data.chat_template_kwargs", takes_any=True
        ),
        lacks(
            "data.custom_cls.path data.datagen.path data.sampler.class_path",
            "a data set of one's own code: write its rows as parquet",
        ),
        fixed("data.custom_cls.name data.datagen.name data.sampler.class_name", "read with its path only"),
        to("data.tokenizer", "model.tokenizer", shared.path),
        to("data.trust_remote_code", "model.trust_remote_code", shared.flag),
        lacks("data.tool_config_path data.function_tool_path", _TOOLS),
        lacks("data.mm_processor_kwargs", _NOT_TEXT),
        verl_prime.FILTER,
    ),
    Section.of(
        "Model",
        to(_M + "path", "model.path", shared.path),
        to(_M + "tokenizer_path", "model.tokenizer", shared.path),
        to(
            _M + "trust_remote_code",
            "model.trust_remote_code",
            shared.flag,
            "Of the tokenizer only: models run no code of theirs.",
        ),
        fixed(
            f"{_M}use_remove_padding {_A}use_remove_padding {_A}megatron.use_remove_padding",
            "sequences are always packed: nothing is padded",
        ),
        to(
            _A + "use_prefix_grouper",
            "policy.share_prefix",
            shared.flag,
            "verl's PrefixGrouper. Groups are kept together whatever trainer.balance_batch says.",
        ),
        fixed(
            (
                f"{_M}use_fused_kernels {_A}use_fused_kernels {_M}fused_kernel_options.* {_M}use_liger "
                f"{_A}use_torch_compile actor_rollout_ref.ref.use_torch_compile {_M}tiled_mlp.*"
            ),
            KERNELS,
        ),
        fixed(f"{_M}use_shm {_M}external_lib {_M}hf_config_path", "how the model's files are read"),
        fixed(_M + "torch_dtype", "verl reads it nowhere: fsdp_config.model_dtype is what it takes"),
        used(
            _M + "enable_gradient_checkpointing",
            "policy.recompute",
            "With FSDP. With Megatron override_transformer_config decides.",
        ),
        slower(_M + "enable_activation_offload", "activations stay on the GPU: use policy.recompute", [False]),
        rows_of_verl(_M, "policy"),
        fixed(_M + "lora.fully_sharded_loras", "how adapters reach the engine: it is given the merged weights"),
        lacks(_M + "custom_chat_template", "a chat template in the configuration: put it into the tokenizer's files"),
        fixed(
            (f"{_M}override_config.max_position_embeddings {_M}override_config.model_config.max_position_embeddings"),
            "RoPE does not depend on it: `check` refuses sequences longer than config.json allows, where it "
            "is to be written",
        ),
        fixed(f"{_M}override_config.attn_implementation {_M}override_config._attn_implementation", KERNELS),
        lacks(
            (f"{_M}override_config.attention_dropout {_M}override_config.embd_pdrop {_M}override_config.resid_pdrop"),
            "dropout",
            [0, 0.0],
        ),
        lacks(
            f"{_M}override_config.** {_M}override_config",
            "changes of config.json: write them into the model's directory",
        ),
        mtp.rows_of_verl(_M),
        lacks(f"{_A}freeze_vision_tower {_A}freeze_non_attn_ffn", "part of the weights frozen", [False]),
        fixed("actor_rollout_ref.hybrid_engine", "the program says whether trainer and engine share the GPUs"),
        slower("actor_rollout_ref.nccl_timeout", "launch.timeout_minutes has its own default"),
        fixed("actor_rollout_ref.checkpoint_engine", "read by asynchronous training only"),
    ),
    Section.of(
        "Training",
        used(
            f"{_A}strategy model_engine --config-name defaults",
            "policy.backend",
            "fsdp and fsdp2 become data-parallel Megatron-Core on as many GPUs, with recomputation and "
            "offload as they were set.",
        ),
        used(
            (
                "trainer.nnodes",
                "trainer.n_gpus_per_node",
                *(
                    f"{_A}megatron.{name}_parallel_size"
                    for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
                ),
                _A + "ulysses_sequence_parallel_size",
                _A + "fsdp_config.ulysses_sequence_parallel_size",
            ),
            "policy.backend",
            "Ulysses' size becomes context parallelism. Expert tensor parallelism left out is that of the model.",
        ),
        used(_A + "megatron.virtual_pipeline_model_parallel_size", "policy.megatron.pipeline"),
        used(_A + "megatron.sequence_parallel", "policy.sequence_parallel"),
        used(_A + "megatron.override_transformer_config.*", "policy.megatron.transformer policy.recompute", takes_any=True),
        fixed(
            (
                f"{_A}megatron.override_transformer_config {_A}megatron.override_ddp_config "
                f"{_A}megatron.override_mcore_model_config critic.megatron.override_mcore_model_config"
            ),
            "empty",
        ),
        slower(_A + "megatron.override_ddp_config.*", "policy.megatron.ddp has its own defaults"),
        used(
            (
                *(f"{_A}{part}.{name}_offload" for part in ("megatron", "fsdp_config") for name in ("param", "optimizer")),
                _A + "megatron.grad_offload",
            ),
            "policy.offload.parameters policy.offload.gradients policy.offload.optimizer",
        ),
        used(
            (f"{_A}use_dynamic_bsz {_A}ppo_max_token_len_per_gpu {_A}ppo_micro_batch_size_per_gpu {_A}ppo_micro_batch_size"),
            "policy.tokens_per_micro_batch",
            "A token budget per GPU, times the GPUs that share a sequence; a number of sequences at their longest. "
            "It cannot change the numbers here.",
        ),
        to(_A + "ppo_epochs", "algorithm.ppo_epochs", shared.whole),
        fixed(f"{_A}shuffle {_A}data_loader_seed", "each update has its own prompts: their order in it changes nothing"),
        used(_A + "optim.lr", "policy.optimizer.lr"),
        used(_A + "optim.weight_decay", "policy.optimizer.weight_decay"),
        used(
            _A + "optim.betas",
            "policy.optimizer.betas",
            "verl hands no betas to Megatron's optimizer (utils/megatron/optimizer.py): 0.9 and 0.999 then.",
        ),
        used(
            f"{_A}grad_clip {_A}optim.clip_grad",
            "policy.optimizer.clip_grad",
            "grad_clip with FSDP, optim.clip_grad with Megatron.",
        ),
        used(
            f"{_A}optim.lr_warmup_steps {_A}optim.lr_warmup_steps_ratio",
            "policy.optimizer.warmup_steps",
            "verl counts steps of the run from 0, so the first of a warm-up has rate 0 (torch_functional.py:769, "
            "engine_workers.py:303): schedule_per: step, warmup_from: 0.",
        ),
        used(
            f"{_A}optim.lr_scheduler_type {_A}optim.warmup_style {_A}optim.lr_decay_style",
            "policy.optimizer.schedule",
        ),
        used(_A + "optim.lr_decay_steps", "policy.optimizer.decay_steps"),
        used(f"{_A}optim.min_lr {_A}optim.min_lr_ratio", "policy.optimizer.min_lr"),
        fixed(f"{_A}optim.total_training_steps critic.optim.total_training_steps", "verl sets it itself"),
        used(_A + "optim.lr_warmup_init", "policy.optimizer.warmup_init_lr", "With Megatron."),
        lacks("**.optim.num_cycles", "a cosine of other cycles", [0.5]),
        lacks("**.optim.weight_decay_incr_style", "weight decay that changes", ["constant"]),
        fixed("**.optim.lr_wsd_decay_style **.optim.lr_wsd_decay_steps", "read with the schedule WSD only"),
        lacks("**.optim.optimizer", "another optimizer than AdamW", ["AdamW", "adam", "adamw", "Adam"]),
        fixed(
            "**.optim.optimizer_impl **.optim.use_checkpoint_opt_param_scheduler **.optim.zero_indexed_step",
            "AdamW is AdamW, and a resumed run goes on with its schedule",
        ),
        used(_A + "optim.override_optimizer_config.*", "policy.megatron.optimizer", takes_any=True),
        fixed(f"{_A}optim.override_optimizer_config critic.optim.override_optimizer_config", "empty"),
        slower("critic.optim.override_optimizer_config.*", "the critic's optimizer stays on its GPU", [False, 0, 1]),
        fixed(
            tuple(
                f"{role}megatron.{name}"
                for role in _TRAINERS
                for name in (
                    "use_mbridge",
                    "vanilla_mbridge",
                    "dist_checkpointing_prefix",
                    "use_distributed_optimizer",
                    "seed",
                    "param_dtype",
                    "forward_only",
                    "dist_ckpt_optim_fully_reshardable",
                    "distrib_optim_fully_reshardable_mem_efficient",
                    "extra",
                )
            ),
            "our own tables read weights, under any prefix of a checkpoint; the optimizer is distributed; a checkpoint "
            "fits every layout",
        ),
        used(
            tuple(
                f"{role}megatron.{name}"
                for role in _TRAINERS
                for name in ("use_dist_checkpointing", "dist_checkpointing_path")
            ),
            "model.path model.config reference.path critic.path reward.model.path",
            "Weights of a checkpoint of Megatron-Core; config.json and tokenizer stay those of the Hugging Face "
            "directory. A value head that it lacks is drawn at random in verl: a critic's starts at 0 here, and a reward "
            "model without one is refused.",
        ),
        slower(
            tuple(f"{role}megatron.use_megatron_fsdp" for role in _TRAINERS),
            "Megatron-FSDP: the distributed optimizer shards instead",
            [False],
        ),
        slower(
            tuple(f"{role}megatron.dynamic_context_parallel" for role in _TRAINERS), "context parallelism by length", [False]
        ),
        fixed(
            tuple(
                f"{role}megatron.{name}"
                for role in _TRAINERS
                for name in (
                    "max_seqlen_per_dp_cp_rank",
                    "pad_bshd_to_minibatch_max",
                    "pad_to_length",
                    "pad_to_length_bucket",
                    "entropy_from_logits_with_chunking",
                    "entropy_from_logits_chunk_size",
                )
            ),
            KERNELS,
        ),
        used(
            f"{_A}router_replay.mode {_A}megatron.router_replay.mode {_A}veomni.router_replay.mode "
            f"{_R}enable_rollout_routing_replay",
            "policy.router_replay engine.mode",
            "By Megatron and VeOmni; actor.router_replay in releases of 2026-01. R3 leaves the last token of a sequence to "
            "the router, as here; the reference chooses for itself in both.",
        ),
        lacks("**router_replay.mode", "replaying the routing of experts in another model than the policy", ["disabled"]),
        fixed("**router_replay.*", "R2 and R3 keep routes with the samples, and read no file"),
        lacks("**qat.enable", "training for a quantized model", [False]),
        fixed("**qat.*", "read with qat.enable only"),
        used(
            f"{_A}megatron.dtype {_A}fsdp_config.dtype {_A}fsdp_config.mixed_precision.param_dtype",
            "policy.dtype",
            "In float16 an update whose gradient overflows is left out and the loss scaled by less, as verl's scaler does.",
        ),
        fixed(
            f"{_A}fsdp_config.mixed_precision.reduce_dtype {_A}fsdp_config.mixed_precision.buffer_dtype "
            f"{_A}fsdp_config.model_dtype",
            "parameters in bfloat16 with a float32 copy in the optimizer, gradients summed in float32",
        ),
        fixed(
            f"{_A}fsdp_config.* {_A}fsdp_config.wrap_policy.* {_A}veomni.* {_A}fsdp_config.turbo_config.**",
            SPREAD,
        ),
        fixed(
            (
                f"{_A}entropy_checkpointing {_A}entropy_from_logits_with_chunking "
                f"{_A}entropy_from_logits_chunk_size {_A}calculate_entropy {_A}calculate_sum_pi_squared "
                f"{_A}sum_pi_squared_checkpointing {_A}rollout_n {_A}pad_to_length"
            ),
            "how the same number is computed",
        ),
        fixed("**._target_", "Hydra's name of a class", takes_any=True),
        used(_A + "optim.eps", "policy.optimizer.eps"),
        fixed(
            "**.optim.use_precision_aware_optimizer **.optim.main_grads_dtype **.optim.exp_avg_dtype "
            "**.optim.exp_avg_sq_dtype **.optim.use_layer_wise_distributed_optimizer",
            "the optimizer's state is in float32: policy.megatron.optimizer has other types",
        ),
        fixed("**.optim.muon_* **.optim.name **.optim.decay_type **.optim.min_lr_factor", "read by other optimizers only"),
        fixed(f"{_A}torchtitan.** {_A}load_weight critic.load_weight {_R}layer_name_map.* {_R}skip_dump_dir", SPREAD),
    ),
    Section.of(
        "Critic and reference",
        used(
            (
                "critic.model.path critic.cliprange_value critic.optim.* critic.grad_clip "
                "critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size_per_gpu "
                "critic.ppo_mini_batch_size critic.ppo_epochs critic.loss_agg_mode "
                "critic.model.enable_gradient_checkpointing critic.model.fsdp_config.param_offload "
                "critic.model.fsdp_config.optimizer_offload critic.megatron.param_offload "
                "critic.megatron.grad_offload critic.megatron.optimizer_offload"
            ),
            "critic.path critic.optimizer critic.value_clip",
            "With adv_estimator=gae.",
        ),
        used(
            "trainer.critic_warmup",
            "critic.warmup_steps",
            "verl's policy learns from step critic_warmup on, counted from 1 (ray_trainer.py:1604): one step less here.",
        ),
        rows_of_verl("critic.model.", "critic"),
        fixed(
            (
                "critic.strategy critic.megatron.** critic.model.** critic.ulysses_sequence_parallel_size "
                "critic.fsdp.** critic.torchtitan.** critic.veomni.** reward_model.load_weight "
                "critic.fsdp_config.* critic.forward_* critic.ppo_micro_batch_size critic.shuffle "
                "critic.rollout_n critic.enable critic.data_loader_seed critic.nccl_timeout "
                "critic.loss_scale_factor"
            ),
            _OF_POLICY,
        ),
        fixed(
            (
                "actor_rollout_ref.ref.strategy actor_rollout_ref.ref.megatron.** "
                "actor_rollout_ref.ref.fsdp_config.** actor_rollout_ref.ref.ulysses_sequence_parallel_size "
                "actor_rollout_ref.ref.log_prob_* actor_rollout_ref.ref.entropy_* "
                "actor_rollout_ref.ref.rollout_n actor_rollout_ref.ref.veomni.* "
                "actor_rollout_ref.ref.profiler.** actor_rollout_ref.ref.use_prefix_grouper "
                "actor_rollout_ref.ref.load_weight actor_rollout_ref.ref.pad_to_length "
                "actor_rollout_ref.ref.use_* actor_rollout_ref.ref.optim.* "
                "actor_rollout_ref.ref.torchtitan.** actor_rollout_ref.ref.ppo_micro_batch_size* "
                "actor_rollout_ref.ref.*_offload actor_rollout_ref.ref.profile"
            ),
            "the reference has the policy's layout, and only computes: no cut changes its numbers. verl and siiRL lay it "
            "out as the actor too, whatever ref.megatron says (megatron_workers.py:284; siiRL's: 882)",
        ),
        fixed(
            "actor_rollout_ref.ref.megatron.override_transformer_config.* critic.megatron.override_transformer_config.*",
            _OF_POLICY,
            takes_any=True,
        ),
        lacks("actor_rollout_ref.ref.model.**", "a reference of other weights: reference.path here"),
    ),
    Section.of(
        "Rollout",
        used(_R + "name", "engine.backend", "sglang and trtllm become vLLM: the same distribution; hf is transformers."),
        used(f"{_R}tensor_model_parallel_size {_R}expert_parallel_size", "engine.backend", "vLLM on the policy's GPUs."),
        to(_R + "n", "algorithm.group_size", shared.whole),
        used(f"{_R}temperature {_R}top_p {_R}top_k", "engine.sampling"),
        used(_R + "gpu_memory_utilization", "engine.memory_fraction"),
        used(f"{_R}max_num_seqs {_R}max_model_len", "engine.max_num_seqs engine.max_model_len"),
        used(
            (f"{_R}enforce_eager {_R}enable_chunked_prefill {_R}enable_prefix_caching {_R}max_num_batched_tokens"),
            "engine.vllm",
        ),
        used(_R + "free_cache_engine", "engine.sleep"),
        used(
            _R + "val_kwargs.*",
            "eval.samples eval.temperature eval.top_p",
            "A greedy evaluation is always made too.",
        ),
        used(
            f"{_R}n_val {_R}val_temperature",
            "eval.samples eval.temperature eval.top_p",
            "Of rLLM's verl of 2025-05: 8 and 0.6 when one of them is left out, top_p 0.95 (vllm_rollout.py:200).",
        ),
        lacks(_R + "ignore_eos", "responses that go on behind their end", [False]),
        lacks(_R + "do_sample", "training on greedy responses", [True]),
        fixed(f"{_R}prompt_length {_R}response_length", "data.max_prompt_length and data.max_response_length say it"),
        fixed(
            (
                f"{_R}mode {_R}async_engine {_R}load_format {_R}layered_summon {_R}skip_tokenizer_init "
                f"{_R}disable_log_stats {_R}calculate_log_probs {_R}enable_log_prob {_R}logprobs_mode "
                f"{_R}update_weights_bucket_megabytes {_R}checkpoint_engine.** {_R}multi_stage_wake_up "
                f"{_R}over_sample_rate {_R}seed {_R}scheduling_policy {_R}enable_sleep_mode "
                f"{_R}cudagraph_capture_sizes {_R}free_kv_cache_engine {_R}standalone_gpu_memory_utilization "
                f"{_R}full_determinism {_R}compute_reward"
            ),
            "the engine is asked for tokens and for the log-prob of each, and is given the whole weights",
        ),
        fixed(f"{_R}log_prob_*", "log-probs are computed under the policy's token budget: no cut changes them"),
        slower(
            f"{_R}data_parallel_size {_R}pipeline_model_parallel_size {_R}moe_tensor_parallel_size",
            "the engine's layout has t and e only",
            [1],
        ),
        used(_R + "dtype", "engine.dtype"),
        used(
            _R + "quantization",
            "engine.vllm.quantization",
            "fp8: weights in blocks of 128 x 128 and activations of 128 with a scale each, of the weights as they come "
            "(vllm_fp8_utils.py, FP8_BLOCK_QUANT_KWARGS): fp8_per_block, which vLLM 0.32 has. The gate of the first step "
            "compares log-probs all the same; engine.max_logprob_diff is its bound. Nobody has run it here.",
        ),
        lacks(f"{_R}quantization_config_file", "weights quantized by a file's rules"),
        slower(_R + "engine_kwargs.**", "engine.vllm takes vLLM's own arguments: these are not carried over"),
        lacks(_R + "multi_turn.enable", _TOOLS, [False]),
        fixed(_R + "multi_turn.*", "read with multi_turn.enable only"),
        lacks(f"{_R}agent.default_agent_loop", _TOOLS, ["single_turn_agent"]),
        lacks(f"{_R}agent.agent_loop_config_path {_R}agent.custom_async_server.path", _TOOLS),
        fixed(f"{_R}agent.* {_R}agent.custom_async_server.*", "how requests are spread"),
        fixed(f"{_R}prometheus.* {_R}trace.* {_R}moe_load_balance_metrics_interval", SHOWN),
        lacks(f"{_R}skip_rollout {_R}use_fire_sampling {_R}qat", "rollouts that are not sampled anew", [False]),
        lacks(_R + "limit_images", _NOT_TEXT),
        lacks(_R + "disaggregation.enabled", "prefill and decoding on different GPUs", [False], changes_result=False),
        fixed(_R + "disaggregation.*", "read with disaggregation.enabled only"),
        lacks(_R + "mtp", "multi-token prediction"),
        used(
            f"rollout.nnodes rollout.n_gpus_per_node {_R}nnodes",
            "engine.backend engine.placement",
            "Of one_step_off_policy and fully_async_policy: GPUs of the engine, behind the policy's. 0 shares the "
            "policy's GPUs.",
        ),
        used(_R + "n_gpus_per_node", "engine.backend engine.placement", "With trainer.v1.trainer_mode=separate_async."),
        used(
            "async_training.staleness_threshold async_training.trigger_parameter_sync_step async_training.require_batches "
            "async_training.partial_rollout rollout.total_rollout_steps rollout.test_freq",
            "rollout data.prompts_per_step algorithm.updates_per_step policy.optimizer.schedule_per trainer.steps "
            "trainer.eval_every",
            "Of fully_async_policy. What lies between two syncs is one step: trigger_parameter_sync_step x "
            "require_batches x ppo_mini_batch_size prompts, an update for each mini-batch. staleness_threshold, the share "
            "of them that is given out ahead (fully_async_rollouter.py, set_max_required_samples), is "
            "rollout.max_staleness; partial_rollout is interrupt: continue, without it finish. verl trains on groups in "
            "the order in which they are complete, however old they are; a step here takes the oldest that are complete, "
            "and what would become too old is sampled again (tail: carry). total_rollout_steps counts prompts, save_freq "
            "and test_freq syncs; the rate moves once in each of the trainer's batches, of require_batches updates. verl "
            "ends with total_epochs where that is earlier: say trainer.steps then.",
        ),
        used(
            "async_training.use_rollout_log_probs async_training.compute_prox_log_prob",
            "algorithm.rollout_correction",
            "Until 2026-02, before rollout_correction.bypass_mode said it; true and false when left out: old log-probs are "
            "the engine's.",
        ),
        used("async_training.concurrent_samples_per_replica", "engine.max_num_seqs", "Prompts in flight in each engine."),
        lacks("async_training.use_dynamic_resource_scheduling", "GPUs that move between trainer and engines", [False]),
        fixed(
            "async_training.enable_reward_queue async_training.reward_queue_size",
            "responses are scored as they finish, while others are sampled",
        ),
        fixed("async_training.**", "how weights are sent, and who evaluates"),
        fixed(
            f"rollout.n rollout.total_epochs {_A}use_rollout_log_probs",
            "actor_rollout_ref.rollout.n, trainer.total_epochs and async_training say it",
        ),
        used(
            "trainer.n_training_gpus_per_node",
            "policy.backend engine.backend engine.placement",
            "Of rLLM's main_ppo_async: the node's other GPUs sample.",
        ),
        fixed("trainer.num_global_batch trainer.num_data_storage_units trainer.num_data_controllers", _STORE),
        lacks("rollout.**", _ASYNC),
    ),
    Section.of(
        "Reward",
        used(
            "custom_reward_function.* reward.custom_reward_function.*",
            "reward.functions",
            "`path.py:name`; the function may name data_source, solution_str, ground_truth, extra_info as with verl.",
        ),
        lacks(
            "custom_reward_function.reward_kwargs.** reward.custom_reward_function.reward_kwargs.**",
            "arguments of a reward function",
        ),
        used(
            "reward_model.reward_manager reward.reward_manager.name reward_manager.name",
            "reward.functions",
            "naive, dapo, prime, batch: the reward function of each data_source.",
        ),
        used(
            (
                "reward_model.overlong_buffer.enable reward_model.overlong_buffer.len "
                "reward_model.overlong_buffer.penalty_factor reward_model.reward_kwargs.overlong_buffer_cfg.enable "
                "reward_model.reward_kwargs.overlong_buffer_cfg.len "
                "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor "
                "reward.reward_kwargs.overlong_buffer_cfg.enable reward.reward_kwargs.overlong_buffer_cfg.len "
                "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor "
                "reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len"
            ),
            "algorithm.overlong_buffer algorithm.overlong_penalty",
            "The formula is the same (workers/reward_manager/dapo.py:112), where max_resp_len is data.max_response_length; "
            "so much above it that no response reaches the buffer, there is no penalty.",
        ),
        fixed(
            "reward_model.overlong_buffer.log reward_model.reward_kwargs.overlong_buffer_cfg "
            "reward_model.reward_kwargs.overlong_buffer_cfg.log reward.reward_kwargs.overlong_buffer_cfg.log",
            SHOWN,
        ),
        lacks("reward_model.reward_kwargs.** reward.reward_kwargs.**", "arguments of a reward manager"),
        used(
            ("reward_model.enable reward_model.model.path reward.reward_model.enable reward.reward_model.model_path"),
            "reward.model.path reward.judge.model",
        ),
        used(
            "reward_model.enable_resource_pool reward_model.nnodes reward_model.n_gpus_per_node "
            "reward.reward_model.enable_resource_pool reward.reward_model.nnodes reward.reward_model.n_gpus_per_node",
            "reward.model.backend reward.model.first_rank engine.mode reward.judge.backend",
            "Ranks of its own behind the policy's, where it is enabled: a replica on each.",
        ),
        used(
            tuple(
                f"{start}.rollout.{name}"
                for start in ("reward_model", "reward.reward_model")
                for name in ("name", "tensor_model_parallel_size", "gpu_memory_utilization", "max_model_len")
            ),
            "reward.judge reward.timeout_seconds reward.wait_seconds",
            "With a custom_reward_function, which asks the model by itself at reward_router_address: servers of vLLM or "
            "SGLang (the function speaks with the one that is named) on as many GPUs, behind those of the machines' ranks. "
            "Without one the reward is the model's score.",
        ),
        verl_prime.REWARDS,
        lacks("reward_model.elliptical.*", "rewards for exploration, by what the policy's hidden states have seen"),
        fixed(
            "reward_model.model.input_tokenizer",
            "the policy's tokens go into the reward model: check that it shares the tokenizer",
        ),
        fixed(
            (
                "reward_model.model.type reward_model.model.fused_kernel_options.impl_backend "
                "reward_model.** reward.reward_model.** reward.num_workers reward.reward_manager.** "
                "reward_manager.** reward.sandbox_fusion.** sandbox_fusion.**"
            ),
            "how rewards are computed side by side",
        ),
    ),
    Section.of(
        "Trainer",
        used(
            "trainer.total_epochs trainer.total_training_steps",
            "trainer.epochs trainer.steps",
            "Steps where both are said.",
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
        fixed(
            "**.checkpoint.contents **.checkpoint.**",
            "a checkpoint has the whole state; `fivefold export` writes Hugging Face's form",
        ),
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
        fixed("trainer.v1.**", "read by other modes of the trainer only"),
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
        fixed("transfer_queue.enable transfer_queue.num_* transfer_queue.**", _STORE),
        lacks("distillation.enabled", "learning from a teacher", [False]),
        fixed("distillation.**", "read with distillation.enabled only"),
        fixed("skip.**", "rollouts are always sampled anew"),
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
    ),
    OLDER,
)
