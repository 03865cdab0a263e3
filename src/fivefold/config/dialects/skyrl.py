"""SkyRL: dataclasses filled from `key=value`, and the Hydra keys of skyrl-train before (PR #223 and after).

Numbers that only SkyRL's code explains were read in SkyRL a9564572e (2026-08-21); a note has the place.
"""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT, KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.table import Section, Table, fixed, lacks, slower, to, used
from fivefold.config.dialects.translator import dialect

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

DEFAULTS: dict[str, Any] = {
    "trainer.strategy": "fsdp",
    "trainer.epochs": 1,
    "trainer.train_batch_size": 1024,
    "trainer.policy_mini_batch_size": 256,
    "trainer.critic_mini_batch_size": 256,
    "trainer.update_epochs_per_batch": 1,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.max_tokens_per_microbatch": -1,
    "trainer.max_prompt_length": 512,
    "trainer.eval_before_train": True,
    "trainer.eval_interval": 5,
    "trainer.ckpt_interval": 10,
    "trainer.max_ckpts_to_keep": -1,
    "trainer.resume_mode": "latest",
    "trainer.seed": 42,
    "trainer.logger": "wandb",
    "trainer.gradient_checkpointing": True,
    "trainer.placement.colocate_all": True,
    "trainer.fully_async.max_staleness_steps": 4,
    "trainer.fully_async.num_parallel_generation_workers": 768,
    "trainer.placement.policy_num_nodes": 1,
    "trainer.placement.policy_num_gpus_per_node": 1,
    "trainer.run_name": "test_run",
    "trainer.ckpt_path": "~/ckpts/${trainer.run_name}",
    _POLICY + "optimizer_config.lr": 1e-6,
    _POLICY + "optimizer_config.adam_betas": [0.9, 0.999],
    _POLICY + "optimizer_config.weight_decay": 0.01,
    _POLICY + "optimizer_config.max_grad_norm": 1.0,
    _POLICY + "optimizer_config.num_warmup_steps": 0,
    _POLICY + "optimizer_config.scheduler": "constant_with_warmup",
    _POLICY + "optimizer_config.offload_after_step": True,
    _POLICY + "sequence_parallel_size": 1,
    "trainer.critic.optimizer_config.lr": 5e-6,
    "trainer.critic.optimizer_config.adam_betas": [0.9, 0.999],
    "trainer.critic.optimizer_config.weight_decay": 0.01,
    "trainer.critic.optimizer_config.max_grad_norm": 1.0,
    "trainer.critic.optimizer_config.num_warmup_steps": 0,
    "trainer.critic.optimizer_config.scheduler": "constant_with_warmup",
    _MEGATRON + "transformer_config_kwargs.recompute_granularity": "full",
    _MEGATRON + "transformer_config_kwargs.recompute_method": "uniform",
    _MEGATRON + "transformer_config_kwargs.recompute_num_layers": 1,
    _MEGATRON + "moe_router_dtype": "fp32",
    _MEGATRON + "moe_token_dispatcher_type": "alltoall",
    _ALGORITHM + "advantage_estimator": "grpo",
    _ALGORITHM + "kl_ctrl.type": "fixed",
    _ALGORITHM + "kl_ctrl.kl_target": 0.1,
    _ALGORITHM + "kl_ctrl.horizon": 10000,
    _ALGORITHM + "kl_estimator_type": "k3",
    _ALGORITHM + "use_kl_in_reward": False,
    _ALGORITHM + "use_kl_loss": True,
    _ALGORITHM + "kl_loss_coef": 0.001,
    _ALGORITHM + "use_entropy_loss": False,
    _ALGORITHM + "entropy_loss_coef": 0.01,
    _ALGORITHM + "policy_loss_type": "regular",
    _ALGORITHM + "loss_reduction": "token_mean",
    _ALGORITHM + "grpo_norm_by_std": True,
    _ALGORITHM + "lambd": 1.0,
    _ALGORITHM + "gamma": 1.0,
    _ALGORITHM + "eps_clip_low": 0.2,
    _ALGORITHM + "eps_clip_high": 0.2,
    _ALGORITHM + "clip_ratio_c": 3.0,
    _ALGORITHM + "dppo.dppo_type": "binary_tv",
    _ALGORITHM + "dppo.delta_low": 0.2,
    _ALGORITHM + "dppo.delta_high": 0.2,
    _ALGORITHM + "value_clip": 0.2,
    _ALGORITHM + "use_tis": False,
    _ALGORITHM + "off_policy_correction.token_tis_ratio_clip_high": 2.0,
    _ALGORITHM + "off_policy_correction.sequence_tis_ratio_clip_high": 5.0,
    _ALGORITHM + "off_policy_correction.geo_mask_high": 1.01,
    _ALGORITHM + "off_policy_correction.geo_mask_low": 0.99,
    _ALGORITHM + "off_policy_correction.product_mask_high": 2.0,
    _ALGORITHM + "off_policy_correction.product_mask_low": 0.5,
    _ALGORITHM + "sapo.tau_pos": 1.0,
    _ALGORITHM + "sapo.tau_neg": 1.05,
    _ALGORITHM + "clip_cov.clip_ratio": 2e-4,
    _ALGORITHM + "clip_cov.clip_cov_lb": 1.0,
    _ALGORITHM + "clip_cov.clip_cov_ub": 5.0,
    _ALGORITHM + "kl_cov.kl_cov_frac": 0.2,
    _ALGORITHM + "kl_cov.ppo_kl_coef": 1.0,
    _ALGORITHM + "cispo.cispo_eps_clip_low": 1.0,
    _ALGORITHM + "cispo.cispo_eps_clip_high": 4.0,
    _ALGORITHM + "dynamic_sampling.max_sample_batches": 30,
    _ALGORITHM + "overlong_buffer_len": 512,
    _ALGORITHM + "overlong_buffer_penalty_factor": 1.0,
    _ENGINE + "num_engines": 1,
    _ENGINE + "tensor_parallel_size": 1,
    _ENGINE + "gpu_memory_utilization": 0.8,
    _ENGINE + "max_num_seqs": 1024,
    _ENGINE + "backend": "vllm",
    "generator.n_samples_per_prompt": 5,
    "generator.sampling_params.max_generate_length": 1024,
    "generator.sampling_params.temperature": 1.0,
    "generator.sampling_params.top_p": 1.0,
    "generator.sampling_params.top_k": -1,
    "generator.sampling_params.min_p": 0.0,
    "generator.sampling_params.repetition_penalty": 1.0,
    "generator.eval_n_samples_per_prompt": 1,
    "generator.apply_overlong_filtering": False,
    "environment.env_class": "gsm8k",
}

_BEFORE_2026_08: dict[str, Any] = {
    "trainer.placement.policy_num_gpus_per_node": 4,
    _ALGORITHM + "cispo.cispo_eps_clip_low": 0.0,
    _ALGORITHM + "cispo.cispo_eps_clip_high": 5.0,
}
VERSIONS: dict[str, dict[str, Any]] = {
    "2026-03": _BEFORE_2026_08,
    "2025-09": {
        **_BEFORE_2026_08,
        _MEGATRON + "transformer_config_kwargs.recompute_granularity": None,
        _MEGATRON + "transformer_config_kwargs.recompute_method": None,
        _MEGATRON + "transformer_config_kwargs.recompute_num_layers": None,
    },
}
"""Month of a release -> defaults that were others."""

ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "advantage": "group"},
    "maxrl": {"name": "maxrl", "advantage": "group", "normalize": "mean"},
    "gae": shared.PPO,
    "rloo": shared.RLOO,
    "reinforce++": shared.REINFORCE_PLUS_PLUS,
}
LOSSES = {
    "regular": {"surrogate": "ppo_clip"},
    "dual_clip": {"surrogate": "ppo_clip"},
    "sapo": {"surrogate": "sapo"},
    "gspo": {"surrogate": "ppo_clip", "importance_sampling_level": "sequence-token"},
    "cispo": {"surrogate": "cispo"},
    "clip_cov": {"surrogate": "clip_cov"},
    "kl_cov": {"surrogate": "kl_cov"},
    "rollout_is": {"surrogate": "rec", "clip_mode": "two_sided", "token_weight": "ratio"},
    "dppo": {"surrogate": "dppo"},
}
REDUCTIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "constant-length",
    "token_mean_legacy": "micro-batch-token-mean",
}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
REWARDS = {"gsm8k": {"gsm8k": 1.0}, "aime": {"math": 2.0}, "math": {"math": 1.0}}
PROGRAMS = ("main_base", "main_dapo", "main_tis_dapo", "main_async", "main_fully_async", "main_dapo_fully_async")


def of_engine(source: Source, name: str) -> str:
    """The key of an engine's setting: of today, or of before 2026 where that one is set."""
    older = f"generator.{OLDER.get(name, name)}"
    return older if source.has(older) and not source.has(_ENGINE + name) else _ENGINE + name


def is_dapo(source: Source) -> bool:
    return (source.text("-m") or "").endswith(("main_dapo", "main_tis_dapo", "main_dapo_fully_async"))


def gpus(source: Source) -> int:
    return source.count("trainer.placement.policy_num_nodes") * source.count("trainer.placement.policy_num_gpus_per_node")


def longest(source: Source) -> int:
    return source.count("trainer.max_prompt_length") + source.count("generator.sampling_params.max_generate_length")


def program(source: Source) -> dict[str, Any]:
    name = source.text("-m")
    if name is not None and name.rpartition(".")[2] not in PROGRAMS:
        source.lacks("-m", "another program than main_base: it may do what no key says")
    key = of_engine(source, "run_engines_locally")
    if source.has(key) and not source.flag(key):
        source.lacks(key, "engines that run elsewhere: engine.url names such servers here")
    return {}


def steps_ahead(source: Source) -> int:
    """By the program: those of main_fully_async, one in main_async, none otherwise."""
    name = (source.text("-m") or "").rpartition(".")[2]
    if name.endswith("fully_async") or source.flag("trainer.fully_async.enabled"):
        return source.count("trainer.fully_async.max_staleness_steps")
    return 1 if name == "main_async" else 0


def ahead(source: Source) -> dict[str, Any]:
    steps = steps_ahead(source)
    if not steps:
        return {}
    if source.flag("trainer.placement.colocate_all"):
        source.lacks(
            "trainer.placement.colocate_all", "asynchronous training on shared GPUs, which SkyRL refuses: say false"
        )
    if (source.text("-m") or "").endswith("main_async") and not source.flag("trainer.fully_async.enabled"):
        return shared.ahead(steps, "finish")
    if source.count("trainer.train_batch_size") != source.count("trainer.policy_mini_batch_size"):
        source.lacks(
            "trainer.policy_mini_batch_size",
            "a step of another size than train_batch_size, which fully asynchronous training refuses: say the same",
        )
    return shared.ahead(steps, "continue", "carry")


def layout(source: Source) -> dict[str, Any]:
    world = gpus(source)
    if source.text("trainer.strategy") != "megatron":
        return {"policy.backend": str(shared.world_layout(world, cp=source.whole(_POLICY + "sequence_parallel_size") or 1))}
    sizes = shared.parallel_sizes(source.under(_MEGATRON))
    return {"policy.backend": str(shared.world_layout(world, **sizes)), "policy.sequence_parallel": True}


def megatron(source: Source) -> dict[str, Any]:
    if source.text("trainer.strategy") != "megatron":
        return {"policy.recompute": "full"} if source.flag("trainer.gradient_checkpointing") else {}
    found: dict[str, Any] = {}
    if source.flag("trainer.gradient_checkpointing"):
        found |= shared.recompute(source, _MEGATRON + "transformer_config_kwargs", "policy")
    found |= shared.megatron_options(source, _MEGATRON + "transformer_config_kwargs", "policy.megatron")
    optimizer = source.under(_MEGATRON + "optimizer_config_kwargs.")
    if optimizer.flag("optimizer_cpu_offload"):
        for name in ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
            found[f"policy.megatron.optimizer.{name}"] = optimizer.value(name)
    if optimizer.flag("use_precision_aware_optimizer"):
        found["policy.megatron.optimizer.use_precision_aware_optimizer"] = True
    return found


def offload(source: Source) -> dict[str, Any]:
    aside = source.flag("trainer.placement.colocate_all") and source.flag(_POLICY + "optimizer_config.offload_after_step")
    return {"policy.offload.optimizer": True} if aside else {}


def micro_batch(source: Source) -> dict[str, Any]:
    budget = source.whole("trainer.max_tokens_per_microbatch") or -1
    if budget > 0:
        return {"policy.tokens_per_micro_batch": max(budget, longest(source))}
    return {"policy.tokens_per_micro_batch": source.count("trainer.micro_train_batch_size_per_gpu") * longest(source)}


def batch(source: Source) -> dict[str, Any]:
    prompts, mini = source.count("trainer.train_batch_size"), source.count("trainer.policy_mini_batch_size")
    if not 0 < mini <= prompts:
        raise UnreadableError(
            f"trainer.policy_mini_batch_size = {mini} must be in 1 to trainer.train_batch_size = {prompts}"
        )
    if prompts % mini:
        source.lacks("trainer.policy_mini_batch_size", f"updates of unequal size: {prompts} prompts are no multiple of it")
    return {"data.prompts_per_step": prompts, "algorithm.updates_per_step": prompts // mini}


def advantage(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    name = said.text("advantage_estimator") or "grpo"
    if name not in ADVANTAGES:
        said.lacks("advantage_estimator", f"the advantage {name}: known here are {', '.join(ADVANTAGES)}")
        return {}
    found = {"whiten": False, "credit": "response", **ADVANTAGES[name]}
    if found["advantage"] == "group":
        found.setdefault("normalize", "group" if said.flag("grpo_norm_by_std") else "none")
        if source.count("generator.n_samples_per_prompt") == 1:
            found |= {"advantage": "reward", "normalize": "none"}
    if found["credit"] != "response":
        found["gamma"] = said.number("gamma")
    if found["credit"] == "gae":
        found["lam"] = said.number("lambd")
    return {f"algorithm.{key}": value for key, value in found.items()}


def loss(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    name, mean = said.text("policy_loss_type") or "regular", said.text("loss_reduction") or "token_mean"
    if name not in LOSSES:
        said.lacks("policy_loss_type", f"the loss {name}: known here are {', '.join(LOSSES)}")
        return {}
    if mean not in REDUCTIONS:
        said.lacks("loss_reduction", f"the mean {mean}: known here are {', '.join(REDUCTIONS)}")
        return {}
    found: dict[str, Any] = {**LOSSES[name], "aggregate": REDUCTIONS[mean]}
    if found["surrogate"] in ("ppo_clip", "clip_cov", "rec"):
        found |= {"clip_low": said.number("eps_clip_low"), "clip_high": said.number("eps_clip_high")}
    if name == "dual_clip":
        found["dual_clip"] = said.number("clip_ratio_c")
    if name == "sapo":
        found |= {"temperature_positive": said.number("sapo.tau_pos"), "temperature_negative": said.number("sapo.tau_neg")}
    if name == "cispo":
        found |= {"clip_low": said.number("cispo.cispo_eps_clip_low"), "clip_high": said.number("cispo.cispo_eps_clip_high")}
        if said.text("cispo.cispo_anchor") == "rollout":
            found["rollout_correction.old_logprobs_from"] = "engine"
    if name == "dppo":
        bounds = said.under("dppo.")
        kind = {"binary_tv": "tv", "binary_kl": "kl"}.get(bounds.text("dppo_type") or "")
        if kind is None:
            bounds.lacks("dppo_type", f"the divergence {bounds.text('dppo_type')}")
        found |= {"divergence": kind, "clip_low": bounds.number("delta_low"), "clip_high": bounds.number("delta_high")}
    if name in ("rollout_is", "dppo"):
        found["rollout_correction.old_logprobs_from"] = "engine"
    if name == "clip_cov":
        cov = said.under("clip_cov.")
        found |= {
            "cov_fraction": cov.number("clip_ratio"),
            "cov_low": cov.number("clip_cov_lb"),
            "cov_high": cov.number("clip_cov_ub"),
        }
    if name == "kl_cov":
        found |= {"cov_fraction": said.number("kl_cov.kl_cov_frac"), "cov_kl_coef": said.number("kl_cov.ppo_kl_coef")}
    if said.flag("use_entropy_loss"):
        said.lacks("use_entropy_loss", "an entropy that is averaged over the tokens of each micro-batch")
    return {f"algorithm.{key}": value for key, value in found.items()}


def kl(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    in_loss, in_reward, coef = said.flag("use_kl_loss"), said.flag("use_kl_in_reward"), said.number("kl_loss_coef")
    if not coef or not (in_loss or in_reward):
        return {"algorithm.kl.coef": 0.0}
    if in_loss and in_reward:
        said.lacks("use_kl_in_reward", "a KL in the loss and another in the reward")
    name = said.text("kl_estimator_type") or "k3"
    if name not in shared.ESTIMATORS:
        said.lacks("kl_estimator_type", f"the estimator {name}")
        return {}
    found: dict[str, Any] = {"estimator": shared.ESTIMATORS[name], "coef": coef, "place": "reward" if in_reward else "loss"}
    if in_reward and said.text("kl_ctrl.type") == "adaptive":
        found |= {"target": said.number("kl_ctrl.kl_target"), "horizon": said.whole("kl_ctrl.horizon")}
    result = {f"algorithm.kl.{key}": value for key, value in found.items()}
    if not in_reward and REDUCTIONS.get(said.text("loss_reduction") or "") not in (
        "seq-mean-token-mean",
        "micro-batch-token-mean",
    ):
        result["algorithm.penalty_aggregate"] = "seq-mean-token-mean"
    return result


def correction(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM)
    if said.flag("use_tis"):
        return {
            "algorithm.rollout_correction.name": "tis",
            "algorithm.rollout_correction.high": said.number("tis_imp_ratio_cap"),
        }
    off = said.under("off_policy_correction.")
    found: dict[str, Any] = {}
    if (level := off.text("tis_ratio_type")) is not None:
        found |= {"weight": level, "high": off.number(f"{level}_tis_ratio_clip_high"), "outside": "truncate"}
    if (metric := off.text("sequence_mask_metric")) is not None:
        short, name = {"geometric": ("geo", "geometric"), "product": ("product", "sequence")}.get(metric, ("", ""))
        if not short:
            off.lacks("sequence_mask_metric", f"the mask {metric}")
        else:
            found |= {
                "reject": name,
                "reject_low": off.number(f"{short}_mask_low"),
                "reject_high": off.number(f"{short}_mask_high"),
            }
    return {f"algorithm.rollout_correction.{key}": value for key, value in found.items()}


def shaping(source: Source) -> dict[str, Any]:
    """DAPO's penalty, in the recipe whose program applies it; responses that were cut off."""
    said, nested = source.under(_ALGORITHM), source.has(_ALGORITHM + "overlong_buffer.len")
    found: dict[str, Any] = {
        "algorithm.overlong_filter": source.flag("generator.apply_overlong_filtering"),
        "algorithm.overlong_buffer": 0,
    }
    start = "overlong_buffer." if nested else "overlong_buffer_"
    if is_dapo(source) or nested:
        found |= {
            "algorithm.overlong_buffer": said.whole(start + "len"),
            "algorithm.overlong_penalty": said.number(start + "penalty_factor"),
        }
    return found


def dynamic_sampling(source: Source) -> dict[str, Any]:
    said = source.under(_ALGORITHM + "dynamic_sampling.")
    kind = said.text("type")
    if kind not in (None, "filter"):
        said.lacks("type", f"dynamic sampling by {kind}: known here is filter")
    if kind is None:
        return {"algorithm.dynamic_sampling": False}
    rounds = said.whole("max_sample_batches") or -1
    found: dict[str, Any] = {"algorithm.dynamic_sampling": True, "algorithm.sampling_rounds": rounds if rounds > 0 else 1000}
    if shaping(source)["algorithm.overlong_buffer"]:
        found["algorithm.dynamic_sampling_by"] = "shaped_reward"
    return found


def optimizer(source: Source, role: str = _POLICY, ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under(role + "optimizer_config.")
    style = said.text("scheduler") or "constant_with_warmup"
    if style not in SCHEDULES:
        said.lacks("scheduler", f"the schedule {style}: known here are {', '.join(SCHEDULES)}")
        style = "constant"
    found = {
        "lr": said.number("lr"),
        "betas": [float(beta) for beta in said.items("adam_betas")],
        "clip_grad": said.number("max_grad_norm"),
        "weight_decay": said.number("weight_decay"),
        "schedule": SCHEDULES[style],
        "warmup_steps": said.whole("num_warmup_steps") or 0,
        "warmup_from": 0,
    }
    return {f"{ours}.{key}": value for key, value in found.items()}


def critic(source: Source) -> dict[str, Any]:
    if source.text(_ALGORITHM + "advantage_estimator") != "gae":
        return {}
    if source.count("trainer.critic_mini_batch_size") != source.count("trainer.policy_mini_batch_size"):
        source.lacks("trainer.critic_mini_batch_size", "the critic learns in the policy's updates")
    found = {
        "critic.path": shared.path(source, "trainer.critic.model.path"),
        "critic.value_clip": source.number(_ALGORITHM + "value_clip"),
    }
    return found | optimizer(source, "trainer.critic.", "critic.optimizer")


def sampling(source: Source) -> dict[str, Any]:
    said = source.under("generator.sampling_params.")
    found: dict[str, Any] = {name: said.number(name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    found["top_k"] = max(0, said.whole("top_k") or 0)
    if said.items("stop"):
        found["stop"] = said.texts("stop")
    return {f"engine.sampling.{key}": value for key, value in found.items()}


def engine(source: Source) -> dict[str, Any]:
    def key(name: str) -> str:
        return of_engine(source, name)

    tp, ep = source.whole(key("tensor_parallel_size")) or 1, source.whole(key("expert_parallel_size")) or 1
    replicas = source.count(key("num_engines")) * (source.whole(key("data_parallel_size")) or 1)
    # What is sharded over stages there is over tensors here.
    tp, ep = tp * (source.whole(key("pipeline_parallel_size")) or 1), ep if ep == tp else 1
    is_colocated = source.flag("trainer.placement.colocate_all")
    if is_colocated and replicas * tp != gpus(source):
        raise UnreadableError(
            f"{key('num_engines')} x tensor_parallel_size = {replicas * tp} must be the policy's {gpus(source)} "
            f"GPUs where all are colocated"
        )
    found: dict[str, Any] = (
        shared.engine_apart(replicas * tp, tp, ep)
        if not is_colocated
        else {"engine.backend": shared.engine_layout(gpus(source), tp, ep)}
    )
    found |= {
        "engine.memory_fraction": source.number(key("gpu_memory_utilization")),
        "engine.max_num_seqs": source.whole(key("max_num_seqs")),
    }
    if source.text(key("backend")) == "vllm":
        for name in ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill"):
            if source.has(key(name)):
                found[f"engine.vllm.{name}"] = source.flag(key(name))
        if source.has(key("max_num_batched_tokens")):
            found["engine.vllm.max_num_batched_tokens"] = source.whole(key("max_num_batched_tokens"))
    workers = source.whole("trainer.fully_async.num_parallel_generation_workers") or 0
    if steps_ahead(source) and 0 < workers < (steps_ahead(source) + 1) * source.count("trainer.train_batch_size"):
        samples = workers * source.count("generator.n_samples_per_prompt")
        found |= shared.at_once(samples, replicas, found["engine.max_num_seqs"])
    return found


def evaluation(source: Source) -> dict[str, Any]:
    said = source.under("generator.eval_sampling_params.")
    length = said.whole("max_generate_length")
    if length is not None and length != source.count("generator.sampling_params.max_generate_length"):
        said.lacks("max_generate_length", "responses of another length in evaluation")
    found: dict[str, Any] = {"eval.samples": 0}
    # Without keys of its own evaluation is greedy.
    if said.number("temperature"):
        found = {
            "eval.samples": source.whole("generator.eval_n_samples_per_prompt"),
            "eval.temperature": said.number("temperature"),
            "eval.top_p": said.number("top_p"),
        }
    return found


def rewards(source: Source) -> dict[str, Any]:
    name = source.text("environment.env_class") or "gsm8k"
    if name not in REWARDS:
        source.lacks(
            "environment.env_class",
            f"the environment {name}: known here are {', '.join(REWARDS)}; reward.functions names others",
        )
        return {}
    if name == "aime" and source.text(_ALGORITHM + "advantage_estimator") in ("gae", "reinforce++"):
        source.lacks("environment.env_class", "rewards of -1 and 1, of which only the difference is kept here")
    spec = "reward_spec.ground_truth" if name == "gsm8k" else None
    return {"reward.functions": dict(REWARDS[name]), "data.ground_truth_key": spec}


def run(source: Source) -> dict[str, Any]:
    mode = (source.text("trainer.resume_mode") or "none").lower()
    resume = {"latest": "auto", "none": "never"}.get(mode, source.text("trainer.resume_path"))
    keep, steps = source.whole("trainer.max_ckpts_to_keep") or -1, source.whole("trainer.max_training_steps")
    return {
        "trainer.resume": resume,
        "trainer.keep": keep if keep > 0 else EVERY_CHECKPOINT,
        "trainer.epochs": source.count("trainer.epochs"),
        "trainer.steps": steps,
        "trainer.run_dir": shared.path(source, "trainer.ckpt_path"),
        "trainer.eval_every": shared.interval(source, "trainer.eval_interval") if source.items("data.val_data") else 0,
    }


_LORA = "low-rank adapters: all weights are trained"
_TOOLS = "tools and several turns"
_SFT = "SFT from data sets of the hub with slices: write their rows as parquet and use algorithm.name: sft"


def _engines(names: str) -> str:
    """Names of engine settings -> their keys, of today and of before."""
    return " ".join(f"{_ENGINE}{name} generator.{OLDER.get(name, name)}" for name in names.split())


SECTIONS = (
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
            "dual_clip is the only one with clip_ratio_c.",
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
            "token_mean counts the tokens of the whole update. seq_mean_token_sum_norm divides by "
            "max_seq_len, prompt included, "
            "constant-length by the longest response: a constant that AdamW does not see but clipping does. "
            "token_mean_legacy depends "
            "on micro-batches, which are cut by tokens here.",
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
            f"{_ALGORITHM}off_policy_correction.product_mask_*",
            "algorithm.rollout_correction",
            "What is masked keeps its place in the denominators, as here: advantages are divided before "
            "(ppo_utils.py:1152).",
        ),
        lacks(f"{_ALGORITHM}off_policy_correction.*", "masks of outlying tokens"),
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
        lacks(f"{_ALGORITHM}temperature", "another temperature of the trainer's log-probs"),
        lacks(_ALGORITHM + "max_seq_len", "another constant than the longest response"),
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
            "aime scores -1 and 1: 0 and 2 here, of which a group's mean takes the constant away.",
        ),
        fixed("environment.skyrl_gym.**", "read by other environments only"),
        lacks(
            "generator.chat_template.name_or_path generator.chat_template_kwargs generator.chat_template_kwargs.**",
            "another chat template",
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
            ),
            "policy.backend",
        ),
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
            f"{_MEGATRON}transformer_config_kwargs.*",
            "policy.recompute policy.megatron.transformer policy.megatron.pipeline",
            takes_any=True,
        ),
        used(f"{_MEGATRON}optimizer_config_kwargs.*", "policy.megatron.optimizer"),
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
        lacks(f"{_MEGATRON}moe_enable_routing_replay", "replaying the routing of experts", [False]),
        lacks(_MEGATRON + "freeze_moe_router", "a router that does not learn", [False]),
        lacks(_MEGATRON + "mtp_num_layers trainer.mtp.enabled", "multi-token prediction", [False]),
        fixed(f"{_MEGATRON}mtp_* trainer.mtp.*", "read with trainer.mtp.enabled only"),
        fixed(
            f"{_MEGATRON}moe_router_score_function {_MEGATRON}moe_router_enable_expert_bias",
            "it comes from the model's config.json",
        ),
        fixed(
            f"{_MEGATRON}ddp_config.* {_MEGATRON}hf_export_config.* {_MEGATRON}empty_cuda_cache "
            f"{_MEGATRON}moe_* {_MEGATRON}*dist_ckpt* {_MEGATRON}async_save_* "
            f"{_MEGATRON}lora_config.* {_MEGATRON}torch_profiler_config.*",
            SPREAD,
        ),
        fixed(
            "trainer.policy.fsdp_config.* trainer.policy.use_torch_compile "
            "trainer.policy.language_model_only trainer.sequence_parallel_backend "
            "trainer.use_expandable_segments trainer.flash_attn trainer.remove_microbatch_padding "
            "trainer.use_sample_packing trainer.fused_lm_head_logprob* "
            "trainer.logprobs_chunk_size trainer.vocab_entropy_chunk_* trainer.policy.inference_only_init",
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
        lacks("trainer.policy.model.lora.rank trainer.ref.model.lora.rank trainer.critic.model.lora.rank", _LORA, [0]),
        fixed("trainer.*.model.lora.*", "read with a rank of adapters only"),
        lacks("trainer.policy.model.fake_int4_qat.enabled", "training for a quantized model", [False]),
        fixed("trainer.*.model.fake_int4_qat.*", "read with enabled only"),
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
        fixed("trainer.critic.**", "it has the policy's layout"),
        to(
            "trainer.ref.model.path",
            "reference.path",
            lambda s, k: shared.path(s, k) if s.flag(_ALGORITHM + "use_kl_loss") else None,
        ),
        fixed("trainer.ref.**", "the reference has the policy's layout, and only computes"),
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
        used(_engines("run_engines_locally"), "engine.url"),
        fixed(
            _engines(
                "async_engine weight_sync_backend vllm_v1_disable_multiproc "
                "weight_transfer_threshold_cuda_ipc_GB model_dtype "
                "distributed_executor_backend language_model_only offload_kv_for_weight_sync "
                "use_expandable_segments enable_ray_prometheus_stats "
                "served_model_name fully_sharded_loras"
            )
            + f" {_ENGINE}delta_weight_sync {_ENGINE}delta_weight_sync.*",
            "the engine is given the whole weights",
        ),
        slower(
            _engines("engine_init_kwargs") + f" {_ENGINE}engine_init_kwargs.** generator.engine_init_kwargs.**",
            "engine.vllm takes vLLM's own arguments: these are not carried over",
        ),
        lacks(_ENGINE + "enable_return_routed_experts", "replaying the routing of experts", [False]),
        slower(_ENGINE + "speculative_config", "speculative decoding"),
        lacks(
            f"{_ENGINE}external_proxy_url {_ENGINE}external_server_urls {_ENGINE}remote_urls "
            f"generator.remote_inference_engine_urls",
            "engines that run elsewhere: engine.url",
        ),
        lacks(_ENGINE + "enable_pd", "prefill and decoding on different GPUs", [False]),
        fixed(f"{_ENGINE}num_prefill {_ENGINE}router_init_kwargs", "read with enable_pd only"),
        used(
            " ".join(
                f"generator.sampling_params.{name}"
                for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
            ),
            "engine.sampling",
        ),
        fixed("generator.sampling_params.logprobs", "log-probs are always recorded"),
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
        fixed("generator.eval_sampling_params.* generator.eval_sampling_params", "log-probs are always recorded"),
        fixed(
            "generator.batched generator.use_conversation_multi_turn "
            "generator.append_eos_token_after_stop_str_in_multi_turn generator.use_cache_salt",
            "one turn is sampled token by token",
        ),
        lacks("generator.max_turns", _TOOLS, [1]),
        lacks("generator.max_input_length", "a limit of prompts in later turns", [512, 1024, 2048]),
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
            "trainer.fully_async.clear_kv_cache_on_weight_sync",
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
            "trainer.placement.colocate_critic_reward trainer.*.deepspeed_config trainer.reward.** deepspeed_config.** "
            "generator.enable_http_endpoint generator.http_endpoint_* generator.override_existing_update_group "
            "generator.model_name use_torch_compile record_memory torch_profiler_config.* enable_ray_gpu_monitor "
            "model_config_kwargs",
            SPREAD,
        ),
        lacks("trainer.rope_scaling trainer.rope_theta generator.rope_scaling generator.rope_theta", "another RoPE"),
        lacks("trainer.algorithm.use_kl_estimator_k3", "the name of 2025: trainer.algorithm.kl_estimator_type", [True]),
        lacks(
            "trainer.algorithm.use_abs_kl trainer.algorithm.normalize_reward trainer.use_orm_score", "keys of 2025", [False]
        ),
        lacks("trainer.num_dummy_steps trainer.override_entrypoint trainer.arctic_rl.**", "another program's key"),
        used("-m", "algorithm.name rollout", "main_base, main_async, main_fully_async, and DAPO's main_dapo."),
        fixed("--config-name --config-path", "how the program is started"),
    ),
    Section.of(
        "SFT",
        lacks(
            "dataset_name train_datasets dataset_split train_dataset_splits train_dataset_weights "
            "pretokenized_dataset_paths",
            _SFT,
        ),
        lacks(
            "batch_size num_steps num_epochs max_length messages_key train_on_what "
            "micro_train_batch_size_per_gpu max_tokens_per_microbatch "
            "model.** optimizer_config.** megatron_config.** fsdp_config.** placement.num_* strategy seed "
            "logger project_name run_name ckpt_path ckpt_interval "
            "resume_from hf_save_interval export_path remove_microbatch_padding use_sequence_packing eval_* "
            "tools_key system_key sampler* num_workers "
            "cache_dir dataloader_* max_ckpts_to_keep max_training_steps tags sequence_parallel_size",
            _SFT,
        ),
    ),
)

DERIVED = (
    program,
    ahead,
    advantage,
    loss,
    kl,
    correction,
    shaping,
    dynamic_sampling,
    batch,
    layout,
    megatron,
    offload,
    micro_batch,
    optimizer,
    critic,
    sampling,
    engine,
    evaluation,
    rewards,
    run,
    shared.tracked("trainer.logger", "trainer.project_name", "trainer.run_name", tags="trainer.tags"),
)

TABLE = Table(
    "SkyRL",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    versions=VERSIONS,
    known=known("skyrl"),
    command=(
        "`fivefold train --from skyrl KEY=VALUE ...`: the arguments of `python -m "
        "skyrl.train.entrypoints.main_base` as they are, or the "
        "script that has them; the Hydra keys of skyrl-train are read too."
    ),
    loses=(
        "environments with tools and several turns",
        "adapters (LoRA)",
    ),
    gains=(
        "critics, context and expert parallelism in every combination",
        "losses and KL that do not depend on micro-batches",
    ),
)

translate = dialect(TABLE)
