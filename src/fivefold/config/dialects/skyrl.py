"""SkyRL: dataclasses filled from `key=value`, and the Hydra keys of skyrl-train before (PR #223 and after).

skyrl_rows.py has what becomes of each key, skyrl_algorithm.py what several of them say of the method; here is the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from fivefold.config.dialects import shared, skyrl_sft
from fivefold.config.dialects import skyrl_rows_releases as releases
from fivefold.config.dialects.adapters import adapters, refuse
from fivefold.config.dialects.known import known
from fivefold.config.dialects.sampler import say_replaced
from fivefold.config.dialects.shared import EVERY_CHECKPOINT
from fivefold.config.dialects.skyrl_algorithm import (
    TOKEN_MEAN,
    advantage,
    constant_scale,
    correction,
    dynamic_sampling,
    kl,
    loss,
    shaping,
)
from fivefold.config.dialects.skyrl_rows import OLDER, SECTIONS
from fivefold.config.dialects.source import Source, UnreadableError, typed
from fivefold.config.dialects.table import Table
from fivefold.config.dialects.translator import dialect

_ALGORITHM, _POLICY, _MEGATRON = "trainer.algorithm.", "trainer.policy.", "trainer.policy.megatron_config."
_ENGINE = "generator.inference_engine."

CONFIG_NAMES = ("ppo_base_config",)
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
    _ALGORITHM + "rollout_correction.token_tis_ratio_cap_high": 2.0,
    _ALGORITHM + "rollout_correction.sequence_tis_ratio_cap_high": 5.0,
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
    **{
        f"trainer.{role}.model.lora.{name}": value
        for role in ("policy", "critic")
        for name, value in (("rank", 0), ("alpha", 16), ("target_modules", "all-linear"), ("init_method", "kaiming"))
    },
}

_BEFORE_2026_08: dict[str, Any] = {
    "trainer.placement.policy_num_gpus_per_node": 4,
    _ALGORITHM + "cispo.cispo_eps_clip_low": 0.0,
    _ALGORITHM + "cispo.cispo_eps_clip_high": 5.0,
}
_BEFORE_2026_04 = _BEFORE_2026_08 | {TOKEN_MEAN: "micro-batch-token-mean"}
VERSIONS: dict[str, dict[str, Any]] = {
    "2026-03": _BEFORE_2026_04,
    "2025-09": {
        **_BEFORE_2026_04,
        _MEGATRON + "transformer_config_kwargs.recompute_granularity": None,
        _MEGATRON + "transformer_config_kwargs.recompute_method": None,
        _MEGATRON + "transformer_config_kwargs.recompute_num_layers": None,
    },
}
"""Month of a release -> defaults that were others."""

SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
REWARDS = {"gsm8k": {"gsm8k": 1.0}, "aime": {"math": 2.0}, "math": {"math": 1.0}, "lcb": {"code": 1.0}}
PROGRAMS = ("main_base", "main_dapo", "main_tis_dapo", "main_async", "main_fully_async", "main_dapo_fully_async")
WITH_A_FUNCTION = {
    "main_custom_policy_loss": (_ALGORITHM + "policy_loss_type", "reinforce"),
    "main_custom_adv_est": (_ALGORITHM + "advantage_estimator", "simple_baseline"),
}
"""SkyRL's examples of functions of one's own, with the key and the name that ask for them."""
FLASHRL = "main_dapo_flashrl"
OTHER_PROGRAMS = {
    "main_full_ctx": "a test of memory on made-up sequences of the longest length, which learns nothing: `fivefold check`",
    "main_fully_async_sim": "training that is only simulated",
    "main_generate": "sampling and scoring without training: `fivefold eval`",
}
"""Programs that are refused, with what they do besides their keys."""


def of_engine(source: Source, name: str) -> str:
    """The key of an engine's setting: of today, or of before 2026 where that one is set."""
    older = f"generator.{OLDER.get(name, name)}"
    return older if source.has(older) and not source.has(_ENGINE + name) else _ENGINE + name


def gpus(source: Source) -> int:
    return source.count("trainer.placement.policy_num_nodes") * source.count("trainer.placement.policy_num_gpus_per_node")


def longest(source: Source) -> int:
    return source.count("trainer.max_prompt_length") + source.count("generator.sampling_params.max_generate_length")


def program(source: Source) -> dict[str, Any]:
    name = (source.text("-m") or "main_base").rpartition(".")[2]
    for example, (key, function) in WITH_A_FUNCTION.items():
        if example != name and source.text(key) == function:
            source.lacks(key, f"the function {function}, which SkyRL's example of it registers, and not {name}")
    if name in (*PROGRAMS, FLASHRL) or name in WITH_A_FUNCTION:
        return {"engine.vllm.quantization": "fp8"} if name == FLASHRL else {}
    source.lacks("-m", OTHER_PROGRAMS.get(name, "another program than main_base: it may do what no key says"))
    return {}


URLS = (_ENGINE + "external_server_urls", _ENGINE + "remote_urls", "generator.remote_inference_engine_urls")
"""Servers that run already; by the oldest names they are host:port."""


def elsewhere(source: Source) -> list[str]:
    """Servers of engines that the program does not start; none where it starts them."""
    key = of_engine(source, "run_engines_locally")
    named = [url for name in URLS for url in (source.texts(name) if source.has(name) else [])]
    if not (source.has(key) and not source.flag(key)) and not source.has(URLS[0]):
        return []
    if not named:
        raise UnreadableError(f"{key}=false needs the addresses of engines: {URLS[0]}")
    return [url if "://" in url else f"http://{url}" for url in named]


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


def of_megatron(source: Source) -> str:
    """The section of the policy's Megatron settings: of today, or the one beside `trainer` of 2025-08 to 2025-10."""
    return "megatron_config.policy." if source.keys("megatron_config.policy.") else _MEGATRON


def layout(source: Source) -> dict[str, Any]:
    world = gpus(source)
    if source.text("trainer.strategy") != "megatron":
        return {"policy.backend": str(shared.world_layout(world, cp=source.whole(_POLICY + "sequence_parallel_size") or 1))}
    sizes = shared.parallel_sizes(source.under(of_megatron(source)))
    return {"policy.backend": str(shared.world_layout(world, **sizes)), "policy.sequence_parallel": True}


def megatron(source: Source) -> dict[str, Any]:
    if source.text("trainer.strategy") != "megatron":
        return {"policy.recompute": "full"} if source.flag("trainer.gradient_checkpointing") else {}
    found: dict[str, Any] = {}
    start = of_megatron(source)
    kwargs = start + "transformer_config_kwargs"
    if source.flag("trainer.gradient_checkpointing"):
        found |= shared.recompute(source, kwargs, "policy")
    found |= shared.megatron_options(source, kwargs, "policy.megatron")
    if (source.whole(start + "pipeline_model_parallel_size") or 1) == 1:
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if found.pop(f"policy.megatron.pipeline.{name}", None) is not None:
                source.fixed(f"{kwargs}.{name}", "there is one stage, which has all layers")
    optimizer = source.under(start + "optimizer_config_kwargs.")
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


def optimizer(source: Source, role: str = _POLICY, ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under(role + "optimizer_config.")
    style = said.text("scheduler") or "constant_with_warmup"
    if style not in SCHEDULES:
        said.lacks("scheduler", f"the schedule {style}: known here are {', '.join(SCHEDULES)}")
        style = "constant"
    clip = said.number("max_grad_norm")
    if role == _POLICY and clip:
        clip *= constant_scale(source)
    found = {
        "lr": said.number("lr"),
        "betas": [float(beta) for beta in said.items("adam_betas")],
        "clip_grad": clip,
        "weight_decay": said.number("weight_decay"),
        "schedule": SCHEDULES[style],
        "warmup_steps": said.whole("num_warmup_steps") or 0,
        "warmup_from": 0,
    }
    return {f"{ours}.{key}": value for key, value in found.items()}


def low_rank(source: Source, role: str = "policy") -> dict[str, Any]:
    start = f"trainer.{role}.model.lora."
    names = {"rank": "rank", "alpha": "alpha", "targets": "target_modules", "exclude": "exclude_modules"}
    found = adapters(source, role, init=start + "init_method", **{name: start + key for name, key in names.items()})
    if found:
        refuse(source, start + "dropout", "dropout of adapters", (0, 0.0))
        refuse(source, f"{_MEGATRON}lora_config.lora_type", "other adapters than LoRA", ("lora", "canonical_lora"))
    return found


def critic(source: Source) -> dict[str, Any]:
    if source.text(_ALGORITHM + "advantage_estimator") != "gae":
        return {}
    if source.count("trainer.critic_mini_batch_size") != source.count("trainer.policy_mini_batch_size"):
        source.lacks("trainer.critic_mini_batch_size", "the critic learns in the policy's updates")
    found = {
        "critic.path": shared.path(source, "trainer.critic.model.path"),
        "critic.value_clip": source.number(_ALGORITHM + "value_clip"),
    }
    return found | optimizer(source, "trainer.critic.", "critic.optimizer") | low_rank(source, "critic")


def sampling(source: Source) -> dict[str, Any]:
    said = source.under("generator.sampling_params.")
    found: dict[str, Any] = {name: said.number(name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    limit, longest_prompt = source.whole("generator.max_input_length"), source.count("trainer.max_prompt_length")
    if limit is not None and limit < longest_prompt:
        source.lacks(
            "generator.max_input_length", f"less than trainer.max_prompt_length = {longest_prompt}, which SkyRL refuses"
        )
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
    is_colocated, urls = source.flag("trainer.placement.colocate_all"), elsewhere(source)
    if urls:
        if is_colocated:
            source.lacks("trainer.placement.colocate_all", "engines that run elsewhere on the policy's GPUs: say false")
        backend = source.text(key("backend")) or "vllm"
        if backend not in ("vllm", "sglang"):
            source.lacks(key("backend"), f"servers of {backend}: known here are vllm and sglang")
        return {"engine.backend": backend, "engine.url": urls}
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
    say_replaced(source, key("backend"), source.text(key("backend")))
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
    spec = "reward_spec.ground_truth" if name in ("gsm8k", "lcb") else None
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


def router_replay(source: Source) -> dict[str, Any]:
    key, by_engine = _MEGATRON + "moe_enable_routing_replay", source.flag(_ENGINE + "enable_return_routed_experts")
    if source.text("trainer.strategy") != "megatron" or not source.flag(key):
        return {}
    if not by_engine:
        source.lacks(key, "R3 without enable_return_routed_experts of the engine, which SkyRL refuses too")
    return shared.replayed("R3")


_PAIR = re.compile(r"([A-Za-z_]\w*)\s*:\s*('[^']*'|\"[^\"]*\"|[^,{}]+)")


def template(source: Source) -> dict[str, Any]:
    """Variables of the chat template, as keys of their own or as `{name:value}`."""
    start = "generator.chat_template_kwargs"
    found = {key.removeprefix(f"{start}."): source.value(key) for key in source.keys(f"{start}.")}
    if source.has(start) and (written := source.raw(start)) not in (None, "null", "{}", {}):
        pairs = written if isinstance(written, dict) else dict(_PAIR.findall(str(written)))
        if not pairs:
            raise UnreadableError(f"{start} must be a mapping: got {written!r}")
        found |= {name: typed(value) if isinstance(value, str) else value for name, value in pairs.items()}
    return {"data.chat_template_kwargs": found} if found else {}


DERIVED = (
    program,
    template,
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
    low_rank,
    critic,
    sampling,
    engine,
    router_replay,
    evaluation,
    rewards,
    run,
    shared.tracked("trainer.logger", "trainer.project_name", "trainer.run_name", tags="trainer.tags"),
)

_OLDER_KEYS = frozenset(f"generator.{name}" for name in OLDER.values())


def release_of(settings: Mapping[str, Any]) -> str:
    """Settings of the package skyrl-train, which ended on 2026-03-02: by its name, or by keys that no later one has."""
    is_older = str(settings.get("-m", "")).startswith("skyrl_train.") or not _OLDER_KEYS.isdisjoint(settings)
    return "2026-03" if is_older else ""


TABLE = Table(
    "SkyRL",
    (*SECTIONS, releases.RL),
    DERIVED,
    DEFAULTS,
    elsewhere={TOKEN_MEAN: "token-mean"},
    versions=VERSIONS,
    release_of=release_of,
    known=known("skyrl"),
    command=(
        "`fivefold train --from skyrl KEY=VALUE ...`: the arguments of `python -m "
        "skyrl.train.entrypoints.main_base` as they are, or the "
        "script that has them; the Hydra keys of skyrl-train are read too."
    ),
    loses=("environments with tools and several turns",),
    gains=(
        "critics, context and expert parallelism in every combination",
        "losses and KL that do not depend on micro-batches",
    ),
)

SFT = Table(
    "SkyRL",
    (*skyrl_sft.SECTIONS, releases.SFT),
    (
        skyrl_sft.program,
        skyrl_sft.data,
        skyrl_sft.layout,
        skyrl_sft.micro_batch,
        skyrl_sft.low_rank,
        skyrl_sft.run,
        skyrl_sft.tracked,
        partial(optimizer, role=""),
    ),
    skyrl_sft.DEFAULTS,
    known=known("skyrl"),
)
OTHER_TABLES = (SFT,)


def table_of(settings: Mapping[str, Any]) -> Table:
    """The table of a program's settings: that of RL or of SFT."""
    return SFT if skyrl_sft.looks_like(settings) else TABLE


translate = dialect(table_of)
