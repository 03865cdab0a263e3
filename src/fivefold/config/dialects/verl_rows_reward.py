"""The rows of verl's table for rewards and reward models."""

from __future__ import annotations

from fivefold.config.dialects import verl_prime
from fivefold.config.dialects.shared import SHOWN
from fivefold.config.dialects.table import Section, fixed, lacks, used

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
        (
            "reward_model.model.type reward_model.model.fused_kernel_options.impl_backend "
            "reward_model.** reward.reward_model.** reward.num_workers reward.reward_manager.** "
            "reward_manager.** reward.sandbox_fusion.** sandbox_fusion.**"
        ),
        "how rewards are computed side by side",
    ),
)
