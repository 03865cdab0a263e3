"""The rows of verl's table for rewards and reward models."""

from __future__ import annotations

from fivefold.config.dialects import verl_prime
from fivefold.config.dialects.shared import KERNELS, NO_CUT, SHOWN
from fivefold.config.dialects.table import Section, below, fixed, lacks, slower, used

_HOW = "how rewards are computed side by side"
_SERVERS = "reward_model.rollout. reward.reward_model.rollout."

REWARD = Section.of(
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
        "naive, dapo, prime, batch: verl's reward function of each data_source (reward.chosen_as: verl, docs/rewards.md).",
    ),
    used(
        (
            "reward_model.overlong_buffer.enable reward_model.overlong_buffer.len "
            "reward_model.overlong_buffer.penalty_factor reward_model.reward_kwargs.overlong_buffer_cfg.enable "
            "reward_model.reward_kwargs.overlong_buffer_cfg.len "
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor "
            "reward.reward_kwargs.overlong_buffer_cfg.enable reward.reward_kwargs.overlong_buffer_cfg.len "
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor "
            "reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len "
            "custom_reward_function.overlong_buffer.enable custom_reward_function.overlong_buffer.len "
            "custom_reward_function.overlong_buffer.penalty_factor"
        ),
        "algorithm.overlong_buffer algorithm.overlong_penalty",
        "The formula is the same (workers/reward_manager/dapo.py:112), where max_resp_len is data.max_response_length; "
        "so much above it that no response reaches the buffer, there is no penalty. naive, prime and batch read "
        "none of it. custom_reward_function has it in DAPO's recipe of 2025-03.",
    ),
    fixed(
        "custom_reward_function.overlong_buffer.log reward_model.overlong_buffer.log "
        "reward_model.reward_kwargs.overlong_buffer_cfg "
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
        "reward_model.strategy reward_model.model.type reward_model.model.fused_kernel_options.impl_backend "
        "reward_model.model.use_fused_kernels reward_model.model.use_remove_padding",
        KERNELS,
    ),
    fixed(
        below("reward_model.", "micro_batch_size forward_max_token_len_per_gpu forward_micro_batch_size")
        + below("reward_model.", "forward_micro_batch_size_per_gpu"),
        NO_CUT,
    ),
    lacks("reward_model.max_length", "a reward model that reads the beginning of a text only"),
    lacks("reward_model.model.override_config reward_model.model.override_config.**", "changes of config.json"),
    fixed(
        "reward_model.model.external_lib reward_model.model.trust_remote_code reward_model.model.use_shm "
        "reward_model.nccl_timeout reward_model.num_workers reward_model.launch_reward_fn_async "
        "reward_model.use_reward_loop reward.num_workers reward_model.sandbox_fusion.** reward.sandbox_fusion.** "
        "sandbox_fusion.**",
        _HOW,
    ),
    lacks(
        "reward_model.reward_loop_class_name reward_model.reward_loop_module_path reward.reward_manager.module.path "
        "reward_manager.module.path",
        "a reward manager of one's own",
    ),
    fixed(
        "reward_model.reward_loop_source reward.reward_manager.source reward.reward_manager.module.name "
        "reward_manager.source reward_manager.module.name",
        "read with a module's path only",
    ),
    lacks(
        below(_SERVERS, "dtype quantization quantization_config_file"),
        "a model that rewards in another type than its own",
        ["bfloat16", "auto"],
    ),
    slower(below(_SERVERS, "engine_kwargs.**"), "engine.vllm takes vLLM's own arguments: these are not carried over"),
    fixed(
        below(
            _SERVERS,
            "cudagraph_capture_sizes data_parallel_size pipeline_model_parallel_size expert_parallel_size disable_log_stats "
            "enable_chunked_prefill enable_prefix_caching enforce_eager free_cache_engine full_determinism layered_summon "
            "load_format max_num_batched_tokens max_num_seqs multi_stage_wake_up scheduling_policy seed skip_tokenizer_init "
            "disaggregation limit_images engine_kwargs mtp",
        ),
        "how the engine serves: the same distribution is sampled",
    ),
    fixed(below(_SERVERS, "disaggregation.*"), "how requests are spread"),
    fixed(
        below(_SERVERS, "prompt_length response_length n do_sample temperature top_k top_p ignore_eos"),
        "each request of a reward function has its own",
    ),
    fixed(
        below("reward_model.", "megatron model model.fsdp_config rollout sandbox_fusion reward_kwargs overlong_buffer")
        + below([""], "reward.reward_model.rollout reward.reward_manager.module reward_manager.module"),
        "empty",
    ),
)
