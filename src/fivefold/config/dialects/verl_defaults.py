"""What verl takes for a key that a configuration leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.dialects import mtp
from fivefold.config.dialects.adapters import VERL_DEFAULTS

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."

DEFAULTS: dict[str, Any] = {
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.gen_batch_size": None,
    _A + "ppo_mini_batch_size": 256,
    _A + "ppo_epochs": 1,
    _A + "use_dynamic_bsz": False,
    _A + "ppo_max_token_len_per_gpu": 16384,
    _A + "clip_ratio": 0.2,
    _A + "clip_ratio_low": 0.2,
    _A + "clip_ratio_high": 0.2,
    _A + "clip_ratio_c": 3.0,
    _A + "loss_agg_mode": "token-mean",
    _A + "entropy_coeff": 0,
    _A + "use_kl_loss": False,
    _A + "kl_loss_coef": 0.001,
    _A + "kl_loss_type": "low_var_kl",
    _A + "policy_loss.loss_mode": "vanilla",
    _A + "policy_loss.clip_cov_ratio": 2e-4,
    _A + "policy_loss.clip_cov_lb": 1.0,
    _A + "policy_loss.clip_cov_ub": 5.0,
    _A + "policy_loss.kl_cov_ratio": 2e-4,
    _A + "policy_loss.ppo_kl_coef": 0.1,
    _A + "tau_pos": 1.0,
    _A + "tau_neg": 1.05,
    _A + "grad_clip": 1.0,
    _A + "ulysses_sequence_parallel_size": 1,
    _A + "optim.lr": 1e-6,
    _A + "optim.betas": [0.9, 0.999],
    _A + "optim.weight_decay": 0.01,
    _A + "optim.clip_grad": 1.0,
    _A + "optim.lr_warmup_steps": -1,
    _A + "optim.lr_warmup_steps_ratio": 0.0,
    _A + "optim.lr_decay_style": "constant",
    _A + "optim.min_lr": 0.0,
    _A + "optim.lr_warmup_init": 0.0,
    _A + "optim.min_lr_ratio": 0.0,
    _A + "megatron.tensor_model_parallel_size": 1,
    _A + "megatron.pipeline_model_parallel_size": 1,
    _A + "megatron.context_parallel_size": 1,
    _A + "megatron.expert_model_parallel_size": 1,
    _A + "megatron.sequence_parallel": True,
    _A + "mindspeed.sequence_parallel": True,
    _A + "megatron.seed": 42,
    _M + "enable_gradient_checkpointing": True,
    **{_M + name: value for name, value in mtp.DEFAULTS.items()},
    **{model + name: value for model in (_M, "critic.model.") for name, value in VERL_DEFAULTS.items()},
    _R + "n": 1,
    _R + "temperature": 1.0,
    _R + "top_k": -1,
    _R + "top_p": 1,
    _R + "tensor_model_parallel_size": 2,
    _R + "gpu_memory_utilization": 0.5,
    _R + "max_num_seqs": 256,
    _R + "expert_parallel_size": 1,
    _R + "enforce_eager": False,
    _R + "val_kwargs.temperature": 0,
    _R + "val_kwargs.top_p": 1.0,
    _R + "val_kwargs.n": 1,
    _R + "val_kwargs.do_sample": False,
    _R + "val_kwargs.top_k": -1,
    _R + "max_num_batched_tokens": 8192,
    "critic.optim.lr": 1e-5,
    "critic.optim.betas": [0.9, 0.999],
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.cliprange_value": 0.5,
    "critic.optim.clip_grad": 1.0,
    "critic.grad_clip": 1.0,
    "critic.optim.lr_decay_style": "constant",
    "critic.optim.min_lr": 0.0,
    "critic.optim.lr_warmup_init": 0.0,
    "critic.optim.min_lr_ratio": 0.0,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.model.enable_gradient_checkpointing": True,
    "critic.ppo_epochs": "${oc.select:actor_rollout_ref.actor.ppo_epochs,1}",
    "critic.ppo_mini_batch_size": "${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}",
    "critic.use_dynamic_bsz": "${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}",
    "critic.loss_agg_mode": "${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}",
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.sppo_eta": 1.0,
    _A + "sppo_eta": 1.0,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    **{
        f"{start}.rollout.{name}": value
        for start in ("reward_model", "reward.reward_model")
        for name, value in (("tensor_model_parallel_size", 2), ("gpu_memory_utilization", 0.5))
    },
    "reward_model.reward_manager": "naive",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.resume_mode": "auto",
    "trainer.logger": ["console", "wandb"],
    "trainer.critic_warmup": 0,
    "trainer.v1.colocate_async.num_warmup_batches": 1,
    "trainer.v1.separate_async.num_warmup_batches": 1,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
}

UNLESS_IN_LOSS = "unless actor.use_kl_loss"
"""What algorithm.use_kl_in_reward was before there was such a key."""
_BEFORE_2025_04_17: dict[str, Any] = {_A + "entropy_coeff": 0.001}
_BEFORE_2025_04: dict[str, Any] = {
    **_BEFORE_2025_04_17,
    "algorithm.use_kl_in_reward": UNLESS_IN_LOSS,
    # One bound, clip_ratio, and no second clip.
    **{f"{_A}clip_ratio_{name}": None for name in ("low", "high", "c")},
}
_BEFORE_2026_08: dict[str, Any] = {_R + "max_num_seqs": 1024}
_BEFORE_2025_10: dict[str, Any] = {**_BEFORE_2026_08, _R + "enforce_eager": True}
_BEFORE_2025_06: dict[str, Any] = {**_BEFORE_2025_10, **_BEFORE_2025_04_17}
VERSIONS: dict[str, dict[str, Any]] = {
    "2026-06": _BEFORE_2026_08,
    "2025-07": _BEFORE_2025_10,
    "2025-06": _BEFORE_2025_10,
    "2025-04": _BEFORE_2025_06,
    "2025-03": {**_BEFORE_2025_06, **_BEFORE_2025_04},
    "2025-02": {**_BEFORE_2025_06, **_BEFORE_2025_04, "data.filter_overlong_prompts": True},
    "2024-11": {
        **_BEFORE_2025_06,
        **_BEFORE_2025_04,
        "data.filter_overlong_prompts": True,
        "trainer.test_freq": 2,
        _M + "enable_gradient_checkpointing": False,
        "critic.model.enable_gradient_checkpointing": False,
    },
}
_ENGINE_OF_MEGATRON = {_R + "tensor_model_parallel_size": 1}
_LAYOUT_OF_MEGATRON: dict[str, Any] = {
    "trainer.test_freq": 2,
    # Only the Megatron trainer had these.
    **{
        f"{role}.megatron.tensor_model_parallel_size": 4
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    },
}
_OF_MEGATRON: dict[str, dict[str, Any]] = {
    "2025-07": {**_ENGINE_OF_MEGATRON, "critic.optim.lr": 1e-6, "critic.optim.lr_decay_style": "linear"},
    "2025-06": _ENGINE_OF_MEGATRON,
    "2025-03": _LAYOUT_OF_MEGATRON,
    "2025-02": {**_LAYOUT_OF_MEGATRON, "trainer.resume_mode": "disable"},
    "2024-11": _LAYOUT_OF_MEGATRON,
}
MEGATRON_VERSIONS = {month: {**defaults, **_OF_MEGATRON.get(month, {})} for month, defaults in VERSIONS.items()}
"""The same for ppo_megatron_trainer.yaml, which says more of itself."""
"""Month of a release -> defaults that were others then (ppo_trainer.yaml of volcengine/verl; ray_trainer.py and dp_actor.py
before 072fc9fee, 6272b8ce1 and 3a27a9864, of 2025-04-01 to 04; 25b0f2262 of 2025-04-17; rl_dataset.py before 386cfabed)."""
GONE = {
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "2025-02",
    "critic.model.fsdp_config.grad_offload": "2025-02",
    "trainer.val_generations_to_log_to_wandb": "2025-03",
    "trainer.remove_previous_ckpt_in_save": "2025-03",
}
"""Keys that no later release starts with: a configuration that has one is of that month or before."""
_CAME = ("algorithm.use_kl_in_reward", *(f"{_A}{name}" for name in ("loss_agg_mode", "clip_ratio_low", "clip_ratio_c")))
_OF_FORKS = ("algorithm.mask_truncated_samples", _A + "use_token_level_loss")


def release_of(settings: Mapping[str, Any]) -> str:
    """The month of the release that a configuration of main_ppo must be of, by keys that are gone since; "" for any."""
    months = [month for key, month in GONE.items() if key in settings]
    is_main = settings.get("-m") in (None, "verl.trainer.main_ppo")
    # Forks have kept some and brought others.
    return min(months) if months and is_main and not any(key in settings for key in (*_CAME, *_OF_FORKS)) else ""
