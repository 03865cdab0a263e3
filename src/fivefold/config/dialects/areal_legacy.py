"""AReaL before 2025-08, whose trainer was another program: `training/main_sync_ppo.py` and `main_async_ppo.py`.

Its keys stand for those of today where they mean the same: DEFAULTS says which, and today's functions read them. What its
code explains was read in AReaL c0ae64f70 (2025-11-13, under realhf/); a note has the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.dialects import areal_method, shared
from fivefold.config.dialects.areal_method import kl, loss, optimizer
from fivefold.config.dialects.areal_placement import ahead, engine, layout
from fivefold.config.dialects.shared import KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Row, Section, fixed, lacks, slower, to, used

TODAY: dict[str, Any] = {
    "total_train_epochs": "${exp_ctrl.total_train_epochs}",
    "total_train_steps": "${exp_ctrl.benchmark_steps}",
    "saver.freq_steps": "${exp_ctrl.save_freq_steps}",
    **dict.fromkeys(("saver.freq_secs", "evaluator.freq_epochs", "evaluator.freq_secs")),
    "recover.mode": "${recover_mode}",
    "stats_logger.wandb.mode": "${wandb.mode}",
    "stats_logger.wandb.project": "${wandb.project}",
    "stats_logger.wandb.name": "${wandb.name}",
    "stats_logger.wandb.group": "${wandb.group}",
    "stats_logger.tensorboard.path": "${tensorboard.path}",
    "train_dataset.batch_size": "${dataset.train_bs_n_seqs}",
    "train_dataset.max_length": "${dataset.max_prompt_len}",
    "gconfig.n_samples": "${group_size}",
    **{
        f"gconfig.{name}": f"${{ppo.gen.{name}}}"
        for name in ("max_new_tokens", "min_new_tokens", "greedy", "top_p", "top_k", "temperature")
    },
    "rollout.max_head_offpolicyness": "${max_head_offpolicyness}",
    "rollout.consumer_batch_size": "${dataset.train_bs_n_seqs}",
    "rollout.max_concurrent_rollouts": "${max_concurrent_rollouts}",
    "actor.dtype": None,
    "actor.temperature": "${ppo.gen.temperature}",
    "actor.mb_spec.max_tokens_per_mb": "${actor_train.mb_spec.max_tokens_per_mb}",
    **{
        f"actor.{name}": f"${{ppo.{name}}}"
        for name in (
            "ppo_n_minibatches",
            "eps_clip",
            "c_clip",
            "kl_ctl",
            "discount",
            "gae_lambda",
            "recompute_logprob",
            "use_decoupled_loss",
            "behav_imp_weight_cap",
        )
    },
    "sglang.mem_fraction_static": "${actor.sglang.mem_fraction_static}",
    **{f"vllm.{name}": f"${{actor.vllm.{name}}}" for name in ("gpu_memory_utilization", "max_num_seqs", "enforce_eager")},
}
"""Key of today -> the older one that stands for it."""

DEFAULTS: dict[str, Any] = {
    **{name[2:-1]: None for name in TODAY.values() if name},
    "exp_ctrl.total_train_epochs": 1,
    "recover_mode": "disabled",
    "wandb.mode": "disabled",
    "shuffle_dataset": True,
    "dataset.max_prompt_len": 256,
    "dataset.train_bs_n_seqs": 256,
    "group_size": 1,
    "group_adv_norm": False,
    "mask_too_long": False,
    "max_head_offpolicyness": 0,
    "max_concurrent_rollouts": "${dataset.train_bs_n_seqs}",
    "success_rate_lb": 0.0,
    "success_rate_ub": 1.0,
    "ppo.gen.max_new_tokens": 16384,
    "ppo.gen.min_new_tokens": 0,
    "ppo.gen.greedy": False,
    "ppo.gen.top_p": 1.0,
    "ppo.gen.top_k": 100_000_000,
    "ppo.gen.temperature": 1.0,
    "ppo.ppo_n_minibatches": 4,
    "ppo.actor_sample_reuse": 1,
    "ppo.eps_clip": 0.2,
    "ppo.early_stop_imp_ratio": 5.0,
    "ppo.max_reward_clip": 20.0,
    "ppo.reward_output_scaling": 1.0,
    "ppo.reward_output_bias": 0.0,
    "ppo.discount": 1.0,
    "ppo.gae_lambda": 1.0,
    "ppo.adv_norm": True,
    "ppo.kl_ctl": 0.1,
    "ppo.disable_value": False,
    "ppo.recompute_logprob": False,
    "ppo.use_decoupled_loss": False,
    "actor.gradient_checkpointing": True,
    "actor.bf16": False,
    "actor.sglang.mem_fraction_static": 0.9,
    "actor.sglang.dtype": "float16",
    "actor.vllm.gpu_memory_utilization": 0.9,
    "actor.vllm.max_num_seqs": 256,
    "actor.vllm.enforce_eager": False,
    "actor.vllm.dtype": "float16",
    "actor.optimizer.lr": 2e-5,
    "actor.optimizer.weight_decay": 0.05,
    "actor.optimizer.beta2": 0.95,
    "actor.optimizer.eps": 1e-5,
    "actor.optimizer.initial_loss_scale": 2.0**32,
    "actor.optimizer.min_loss_scale": 1.0,
    "actor.optimizer.loss_scale_window": 5,
    "actor.optimizer.hysteresis": 2,
}
"""Of realhf/api/cli_args.py, as far as they are others than today's."""

_CRITIC = "a critic whose values are normalized by a running mean: ppo.disable_value=true does without"
_REWARDS = {"math": {"math_any": 1.0}, "stem": {"math_any": 1.0}, "code": {"code": 1.0}}
"""By the column `task` (math_code_dataset.py:90, math_rw_interface.py:104)."""

_ASYNCHRONOUS = ("max_head_offpolicyness", "max_concurrent_rollouts", "n_rollout_workers", "flush_request_timeout")
"""Keys of main_async_ppo.py alone."""


def is_legacy(settings: Mapping[str, Any]) -> bool:
    """Settings of the older program: a section of it, or a model's family by its class."""
    return any(key.startswith(("ppo.", "exp_ctrl.")) or key.endswith(".type._class") for key in settings)


def advantage(source: Source) -> dict[str, Any]:
    said = source.under("ppo.")
    if not said.flag("disable_value"):
        said.lacks("disable_value", _CRITIC)
    found: dict[str, Any] = {
        "name": "grpo",
        "advantage": "reward",
        "normalize": "none",
        "whiten": said.flag("adv_norm"),
        "overlong_filter": source.flag("mask_too_long"),
        **areal_method.credit(source),
    }
    if source.flag("group_adv_norm"):
        found["whiten_by"] = "group"
    if not found["whiten"]:
        said.lacks("adv_norm", "rewards of -1 and 1 as they are, scaled: only their difference is kept here")
    if (said.number("early_stop_imp_ratio") or 0.0) < 5.0:
        said.lacks("early_stop_imp_ratio", "micro-batches that are left out as soon as ratios move")
    return {f"algorithm.{key}": value for key, value in found.items()}


def dynamic_sampling(source: Source) -> dict[str, Any]:
    """Prompts that all responses solve, or none, are sampled anew where the bounds say just that."""
    if not any(source.has(key) for key in _ASYNCHRONOUS):
        return {}
    low, high = source.number("success_rate_lb") or 0.0, source.number("success_rate_ub")
    high, one = 1.0 if high is None else high, 1 / source.count("group_size")
    if low <= 0 and high >= 1:
        return {}
    if not (0 < low <= one and 1 - one <= high < 1):
        source.lacks("success_rate_lb", f"prompts by the share that is solved, within {low:g} and {high:g}")
    return {"algorithm.dynamic_sampling": True}


def correction(source: Source) -> dict[str, Any]:
    """As today's, but without a cap the weight of the decoupled loss has no bound."""
    found = areal_method.correction(source)
    if source.flag("actor.use_decoupled_loss") and source.number("actor.behav_imp_weight_cap") is None:
        unbounded = {"weight": "token", "high": 1e9}
        found |= {f"algorithm.rollout_correction.{key}": value for key, value in unbounded.items()}
    return found


def precision(source: Source) -> dict[str, Any]:
    """float16 unless bf16 is set, of engines float16 unless their dtype says otherwise."""
    trains = "bfloat16" if source.flag("actor.bf16") else "float16"
    found: dict[str, Any] = {"policy.dtype": trains}
    name = "actor.vllm.dtype" if (source.text("allocation_mode") or "").startswith("vllm") else "actor.sglang.dtype"
    samples = source.text(name) or trains
    if samples not in ("auto", *shared.DTYPES):
        source.lacks(name, f"sampling in {samples}")
    elif samples != "auto" and shared.DTYPES[samples] != trains:
        found["engine.dtype"] = shared.DTYPES[samples]
    return found | (loss_scale(source, "actor.optimizer.") if trains == "float16" else {})


def loss_scale(source: Source, start: str) -> dict[str, Any]:
    """How a loss in float16 is scaled."""
    found = {name: source.number(start + name) for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window")}
    found["hysteresis"] = int(source.number(f"{start}hysteresis") or 0)
    return {f"policy.megatron.optimizer.{name}": value for name, value in found.items()}


def rewards(source: Source) -> dict[str, Any]:
    """A row's task chooses the verifier; its rewards of -1 and 1, scaled, are 0 and 1 behind the normalization."""
    return {
        "reward.functions": {"math_any": 1.0},
        "reward.by_source": _REWARDS,
        "data.source_key": "task",
        "data.apply_chat_template": False,
        "data.ground_truth_key": "solutions",
        "data.ground_truth_by_source": {"code": "input_output"},
    }


def optimizer_rows(role: str) -> list[Row]:
    """AdamW, as the section of this model has it."""
    at = f"{role}.optimizer."
    return [
        *used(f"{at}lr", "policy.optimizer.lr", "2e-5 when left out."),
        *used(f"{at}weight_decay", "policy.optimizer.weight_decay", "0.05 when left out."),
        *used(f"{at}eps", "policy.optimizer.eps", "1e-5 when left out."),
        *used(f"{at}beta1 {at}beta2", "policy.optimizer.betas", "0.9 and 0.95 when left out."),
        *used(f"{at}gradient_clipping", "policy.optimizer.clip_grad"),
        *used(f"{at}lr_scheduler_type", "policy.optimizer.schedule"),
        *used(f"{at}min_lr_ratio", "policy.optimizer.min_lr"),
        *used(
            f"{at}warmup_steps_proportion",
            "policy.optimizer.warmup_steps",
            "A share of the run's steps, from rate 0 on. The first update of a step still has the rate of the step "
            "before (backend/megatron.py:533); here all have the step's.",
        ),
        *used(
            f"{at}initial_loss_scale {at}min_loss_scale {at}loss_scale_window {at}hysteresis", "policy.megatron.optimizer"
        ),
        *used(f"{at}type", "policy.optimizer", "AdamW; another one is refused."),
        *fixed(f"{at}offload", SPREAD),
    ]


PLACES = [
    *fixed(
        "mode n_nodes n_gpus_per_node partition schedule_strategy schedule_policy nodelist exclude debug "
        "ignore_worker_error metric_discovery_port ray_temp_path torch_cache_mysophobia cache_clear_freq "
        "cpus_per_master_worker mem_per_master_worker cpus_per_model_worker mem_per_model_worker "
        "cpus_per_generation_server mem_per_generation_server cpus_per_gserver_manager mem_per_gserver_manager "
        "cpus_per_rollout_worker mem_per_rollout_worker n_rollout_workers flush_request_timeout new_tokens_per_chunk "
        "cluster.n_nodes cluster.n_gpus_per_node cluster.config_path cluster.cluster_name cluster.gpu_type "
        "cluster.mount cluster.gpu_image cluster.cpu_image cluster.gpu_infer_image cluster.node_name_prefix "
        "cluster.name_resolve.type cluster.name_resolve.nfs_record_root cluster.name_resolve.etcd3_addr "
        "cluster.name_resolve.ray_actor_name external_configs.** *.scheduling_spec",
        "the layout says how many GPUs; how they are started is launch's",
        takes_any=True,
    ),
]
"""Where the programs run, and how they are started."""
RUN = [
    to("shuffle_dataset", "data.shuffle", shared.flag),
    *used("seed", "trainer.seed"),
    *used("experiment_name trial_name cluster.fileroot", "trainer.run_dir tracking.project tracking.name"),
    *used("recover_mode", "trainer.resume"),
    *used("exp_ctrl.total_train_epochs", "trainer.epochs"),
    *used("exp_ctrl.benchmark_steps", "trainer.steps"),
    *lacks("exp_ctrl.benchmark_n_seqs", "a bound by sequences: say benchmark_steps"),
    *used("exp_ctrl.save_freq_steps", "trainer.save_every"),
    *slower(
        "exp_ctrl.save_freq_epochs exp_ctrl.save_freq_secs exp_ctrl.ckpt_freq_epochs exp_ctrl.ckpt_freq_steps "
        "exp_ctrl.ckpt_freq_secs exp_ctrl.eval_freq_epochs exp_ctrl.eval_freq_steps exp_ctrl.eval_freq_secs",
        "epochs or seconds between checkpoints, and evaluations by another program: say save_freq_steps",
    ),
    *used("wandb.mode wandb.project wandb.name wandb.group tensorboard.path", "trainer.loggers tracking"),
    *fixed(
        "wandb.entity wandb.job_type wandb.notes wandb.tags wandb.config swanlab.mode swanlab.project swanlab.name "
        "swanlab.config swanlab.logdir swanlab.api_key recover_retries recover_after auto_eval auto_eval_config.*",
        SHOWN,
        takes_any=True,
    ),
    *fixed("-m", "how the program is started"),
    *fixed("--config-name --config-path --config", "how the program is started"),
]
"""What all programs have of a run."""


METHOD = (ahead, layout, engine, precision, advantage, dynamic_sampling, loss, kl, correction, optimizer, rewards)
SECTIONS = (
    Section.of(
        "Before 2025-08: placement and models",
        used("allocation_mode", "policy.backend engine.backend", "sglang.d64p1m1+d32p2m1: m is tensor parallelism."),
        *PLACES,
        used(
            "max_head_offpolicyness",
            "rollout",
            "Today's rule (gserver_manager.py:334). Rollouts go on under new weights, and the oldest are taken.",
        ),
        used("max_concurrent_rollouts", "engine.max_num_seqs", "Prompts in flight at once, those of a step when left out."),
        used("actor.path", "model.path"),
        fixed(
            "actor.type._class ref.type._class critic.type._class rew.type._class actor.type.is_critic "
            "ref.type.is_critic critic.type.is_critic rew.type.is_critic",
            "config.json names the family",
        ),
        used(
            "actor.bf16",
            "policy.dtype policy.megatron.optimizer",
            "float16 when left out, with a loss scale that begins at 2^32 and doubles after five good updates.",
        ),
        used("actor.sglang.dtype actor.vllm.dtype", "engine.dtype", "float16 when left out."),
        used("actor.gradient_checkpointing", "policy.recompute"),
        used("actor_train.mb_spec.max_tokens_per_mb", "policy.tokens_per_micro_batch"),
        lacks(
            "actor.init_from_scratch actor.init_critic_from_actor ref.init_from_scratch ref.init_critic_from_actor",
            "weights that are drawn",
            [False],
        ),
        used("actor.sglang.mem_fraction_static actor.vllm.gpu_memory_utilization", "engine.memory_fraction"),
        used("actor.vllm.max_num_seqs", "engine.max_num_seqs"),
        used("actor.vllm.enforce_eager", "engine.vllm"),
        lacks("actor.sglang.torchao_config", "engines that quantize", [""]),
        lacks("actor.sglang.kv_cache_dtype actor.vllm.kv_cache_type", "a cache in 8 bits", ["auto"]),
        fixed("actor.sglang.** actor.vllm.**", KERNELS, takes_any=True),
        fixed("actor.megatron.** actor.backend ref.backend", SPREAD, takes_any=True),
        fixed(
            "ref.** rew.** critic.** ref_inf.** rew_inf.** actor_inf.** actor_gen.** critic_inf.** critic_train.** "
            "actor_train.**",
            "the reference computes as the policy does; no cut changes the numbers",
            takes_any=True,
        ),
        *optimizer_rows("actor"),
    ),
    Section.of(
        "Before 2025-08: PPO",
        used("ppo.ppo_n_minibatches", "algorithm.updates_per_step", "As many prompts in each; there tokens are balanced."),
        to("ppo.actor_sample_reuse", "algorithm.ppo_epochs", shared.whole),
        used("ppo.eps_clip", "algorithm.clip_low algorithm.clip_high"),
        used("ppo.c_clip", "algorithm.dual_clip"),
        used(
            "ppo.early_stop_imp_ratio",
            "trainer.guard",
            "5 when left out: a micro-batch whose mean ratio is above it adds nothing (ppo_interface.py:160). A guard "
            "against runs that come apart, which policy/ratio_mean shows here; below 5 it is refused.",
        ),
        used(
            "ppo.adv_norm group_adv_norm",
            "algorithm.whiten algorithm.whiten_by",
            "Mean 0 and variance 1 over the tokens of the step, or of each prompt's responses.",
        ),
        fixed(
            "ppo.reward_output_scaling ppo.reward_output_bias ppo.max_reward_clip rw_type",
            "a constant and a factor of rewards of -1 and 1, which adv_norm takes away again",
        ),
        used("ppo.discount ppo.gae_lambda", "algorithm.credit algorithm.gamma"),
        used("ppo.kl_ctl", "algorithm.kl", "0.1 when left out, in the reward of each token (ppo_functional.py:266)."),
        lacks("ppo.use_adaptive_kl_ctl", "a KL coefficient that moves in every micro-batch", [False]),
        used("ppo.disable_value", "algorithm.name", "Without it there is a critic, which is refused."),
        fixed(
            "ppo.value_eps_clip ppo.critic_sample_reuse ppo.value_norm ppo.value_norm_type ppo.value_norm_beta "
            "ppo.value_norm_eps ppo.fuse_rew_ref",
            "read with a critic only, or how passes are arranged",
        ),
        used(
            "ppo.recompute_logprob ppo.use_decoupled_loss ppo.behav_imp_weight_cap",
            "algorithm.rollout_correction",
            "Without either the old log-probs are the engine's. What the cap masks keeps its place in the denominator.",
        ),
        used("mask_too_long", "algorithm.overlong_filter"),
        lacks("mask_no_eos_with_zero", "a reward of 0 for responses that were cut off", [False]),
        lacks("generation_size", "the best of more responses than are learned from"),
        lacks("ref_ema_eta", "a reference that moves"),
        lacks("check_xml_format check_verifier_status no_training", "rewards of a format, and tests", [False]),
        used(
            "success_rate_lb success_rate_ub",
            "algorithm.dynamic_sampling",
            "Of the asynchronous program: bounds that leave out prompts which all responses solve, or none.",
        ),
        lacks("dataset_max_filter_percentage", "prompts that an epoch leaves out", [0, 0.0]),
        fixed("dataset_filter_threshold", "read with dataset_max_filter_percentage only"),
        used("group_size", "algorithm.group_size"),
        used("ppo.gen.max_new_tokens", "data.max_response_tokens"),
        used(
            "ppo.gen.min_new_tokens ppo.gen.greedy ppo.gen.top_p ppo.gen.top_k ppo.gen.temperature",
            "engine.sampling",
            "top_k above every vocabulary is none.",
        ),
        fixed(
            "ppo.gen.n ppo.gen.use_cuda_graph ppo.gen.force_cudagraph_recapture ppo.gen.force_no_logits_mask",
            "group_size says it, or how tokens are computed",
        ),
    ),
    Section.of(
        "Before 2025-08: data and run",
        to(
            "dataset.path",
            "data.train",
            shared.files,
            "jsonl with prompt, task, solutions and input_output. The model reads the prompt without a template; the task "
            "chooses the reward, math_any or code.",
        ),
        used("dataset.max_prompt_len", "data.max_prompt_tokens", "Longer prompts are dropped, as there."),
        used("dataset.train_bs_n_seqs", "data.prompts_per_step", "Prompts."),
        lacks("dataset.fill_to_max_length", "prompts that are filled for tests", [False]),
        *RUN,
    ),
)
