"""The rows of verl's table for the engine, and sampling ahead of the trainer."""

from __future__ import annotations

from fivefold.config.dialects import shared
from fivefold.config.dialects.shared import NO_CUT, SHOWN
from fivefold.config.dialects.table import Section, below, fixed, lacks, slower, to, used
from fivefold.config.dialects.verl_rows_data import NOT_TEXT, TOOLS

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_ASYNC = (
    "sampling while the policy learns (asynchronous training), of another program than one_step_off_policy and "
    "fully_async_policy"
)
STORE = "how rollouts are stored between sampling and training"

ROLLOUT = Section.of(
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
        "eval.samples eval.temperature eval.top_p eval.top_k",
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
            f"{_R}update_weights_bucket_megabytes {_R}multi_stage_wake_up "
            f"{_R}over_sample_rate {_R}seed {_R}scheduling_policy {_R}enable_sleep_mode "
            f"{_R}cudagraph_capture_sizes {_R}free_kv_cache_engine {_R}standalone_gpu_memory_utilization "
            f"{_R}full_determinism {_R}compute_reward"
        ),
        "the engine is asked for tokens and for the log-prob of each, and is given the whole weights",
    ),
    fixed(f"{_R}checkpoint_engine.**", "how weights travel to the engine"),
    fixed(
        below(_R, "log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu")
        + below(_R, "log_prob_use_dynamic_bsz"),
        NO_CUT,
    ),
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
        "compares log-probs all the same; engine.max_logprob_kl is its bound. It has not run here.",
    ),
    lacks(f"{_R}quantization_config_file", "weights quantized by a file's rules"),
    lacks(
        below(_R + "engine_kwargs.*.", "kv_cache_dtype quantization dtype hf_overrides logits_processors"),
        "options of the engine that change what it samples: engine.vllm has them",
        ["auto", "bfloat16"],
    ),
    slower(_R + "engine_kwargs.**", "engine.vllm takes vLLM's own arguments: these are not carried over"),
    lacks(_R + "multi_turn.enable", TOOLS, [False]),
    fixed(_R + "multi_turn.*", "read with multi_turn.enable only"),
    lacks(f"{_R}agent.default_agent_loop", TOOLS, ["single_turn_agent"]),
    lacks(f"{_R}agent.agent_loop_config_path {_R}agent.custom_async_server.path", TOOLS),
    fixed(f"{_R}agent.* {_R}agent.custom_async_server.*", "how requests are spread"),
    fixed(f"{_R}prometheus.* {_R}trace.* {_R}moe_load_balance_metrics_interval", SHOWN),
    lacks(f"{_R}skip_rollout {_R}use_fire_sampling {_R}qat", "rollouts that are not sampled anew", [False]),
    lacks(_R + "limit_images", NOT_TEXT),
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
    fixed("async_training.checkpoint_engine async_training.checkpoint_engine.**", "how weights travel to the engine"),
    fixed("async_training.use_trainer_do_validate", "the run's engines evaluate"),
    fixed(
        below("async_training.dynamic_schedule_", "deactivate_ratio enable_rebalance policy"),
        "read with use_dynamic_resource_scheduling only",
    ),
    fixed(
        f"rollout.n rollout.total_epochs {_A}use_rollout_log_probs",
        "actor_rollout_ref.rollout.n, trainer.total_epochs and async_training say it",
    ),
    used(
        "trainer.n_training_gpus_per_node",
        "policy.backend engine.backend engine.placement",
        "Of rLLM's main_ppo_async: the node's other GPUs sample.",
    ),
    fixed("trainer.num_global_batch trainer.num_data_storage_units trainer.num_data_controllers", STORE),
    lacks("rollout.**", _ASYNC),
)
