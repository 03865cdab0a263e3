"""ROLL: YAML with one section for each role, `python examples/start_rlvr_pipeline.py --config_path DIR --config_name FILE`.

Numbers that only ROLL's code explains were read in ROLL 8eb27cc2 (2026-08-18); a note has the place.
"""

from __future__ import annotations

from typing import Any

from fivefold.config.device_mapping import parse_devices
from fivefold.config.dialects import shared
from fivefold.config.dialects.adapters import adapters, refuse
from fivefold.config.dialects.known import known
from fivefold.config.dialects.shared import EVERY_CHECKPOINT, KERNELS, SHOWN, SPREAD
from fivefold.config.dialects.source import Source, UnreadableError
from fivefold.config.dialects.table import Section, Table, fixed, lacks, to, used
from fivefold.config.dialects.translator import dialect

_TRAIN, _INFER = "actor_train.", "actor_infer."
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "output_dir": "./output",
    "num_gpus_per_node": 8,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "response_length": 1024,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "lambd": 0.95,
    "gamma": 1.0,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "use_pg_clip_range": False,
    "kl_penalty": "kl",
    "init_kl_coef": 0.2,
    "kl_horizon": 10000,
    "adv_estimator": "gae",
    "whiten_advantages": False,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    "dual_clip_loss": False,
    "importance_sampling": "token",
    "add_token_level_kl": False,
    "max_ckpt_to_keep": 0,
    "resume_from_checkpoint": False,
    "track_with": "tensorboard",
    "max_len_mask": False,
    "difficulty_mask": False,
    "difficulty_low_threshold": 0.1,
    "difficulty_high_threshold": 0.95,
    _TRAIN + "pg_variant": "vanilla",
    _TRAIN + "tis_lower_bound": 0.0,
    _TRAIN + "tis_upper_bound": 1.0,
    _TRAIN + "topr_positive_weight": 1.0,
    _TRAIN + "topr_negative_weight": 1.0,
    _TRAIN + "cispo_epsilon_low": 0.1,
    _TRAIN + "cispo_epsilon_high": 0.1,
    _TRAIN + "cispo_use_unified_mask": False,
    _TRAIN + "kimi15_tau": 0.1,
    "num_return_sequences_in_group": 1,
    "sequence_length": 2048,
    "beta": 0.1,
    "label_smoothing": 0.0,
    "train_batch_size": 8,
    _INFER + "generating_args.temperature": 1.0,
    _INFER + "generating_args.top_p": 1.0,
    _INFER + "generating_args.top_k": 50,
    _INFER + "strategy_args.strategy_config.gpu_memory_utilization": 0.8,
    **{f"{name}.model_args.lora_rank": 8 for name in ("actor_train", "sft_train")},
}
for _role in ("actor_train", "critic", "sft_train"):
    DEFAULTS |= {
        f"{_role}.training_args.learning_rate": 5e-5,
        f"{_role}.training_args.weight_decay": 0.0,
        f"{_role}.training_args.warmup_steps": 0,
        f"{_role}.training_args.adam_beta1": 0.9,
        f"{_role}.training_args.adam_beta2": 0.999,
        f"{_role}.training_args.lr_scheduler_type": "linear",
        f"{_role}.training_args.per_device_train_batch_size": 8,
        f"{_role}.training_args.gradient_accumulation_steps": 1,
    }


def kind(source: Source) -> str:
    """rlvr, sft or dpo: by the sections that are there."""
    if source.keys("sft_train."):
        return "sft"
    return "dpo" if source.has("chosen_key") else "rlvr"


def role(source: Source) -> str:
    return "sft_train." if kind(source) == "sft" else _TRAIN


def devices(source: Source, key: str) -> list[int]:
    """The GPUs that a mapping names."""
    try:
        return parse_devices(source.raw(key))
    except ValueError as error:
        raise UnreadableError(f"{key} {error}") from None


def sizes(source: Source) -> dict[str, int]:
    said = source.under(role(source))
    name = said.text("strategy_args.strategy_name") or "megatron_train"
    if not name.startswith("megatron"):
        return {"cp": said.whole("model_args.ulysses_size") or 1}
    return shared.parallel_sizes(said.under("strategy_args.strategy_config."))


def layout(source: Source) -> dict[str, Any]:
    """Of the policy, and of the other models that Megatron lays out otherwise, on the same ranks."""
    policy = shared.world_layout(len(devices(source, role(source) + "device_mapping")), **sizes(source))
    found: dict[str, Any] = {"policy.backend": str(policy)}
    asked = {"reference": kind(source) != "sft", "critic": kind(source) == "rlvr" and uses_critic(source)}
    for name in (name for name, is_asked in asked.items() if is_asked):
        said = source.under(f"{name}.strategy_args.")
        if (said.text("strategy_name") or "").startswith("megatron"):
            own = shared.own_layout(policy, **shared.parallel_sizes(said.under("strategy_config.")))
            virtual = said.whole("strategy_config.virtual_pipeline_model_parallel_size") or 1
            if own is not None:
                found[f"{name}.backend"] = own
                if virtual > 1:
                    found[f"{name}.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    return found


def uses_critic(source: Source) -> bool:
    return source.text("adv_estimator") in (None, "gae")


_OPTIONS_OF_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
    "additional_configs",
)
_OPTIONS_FIXED = (
    "bf16",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "delay_grad_reduce",
    "accumulate_allreduce_grads_in_fp32",
    "ckpt_format",
    "save_hf_model",
    "distrib_optim_fully_reshardable",
    "check_for_nan_in_loss_and_grad",
    "ddp_average_in_collective",
    "optimizer",
    "transformer_impl",
    "calculate_per_token_loss",
    "apply_expert_patch",
    "apply_tiled_mlp",
    "use_batched_model_update",
    "optimizer_cpu_offload",
)


def megatron(source: Source) -> dict[str, Any]:
    said = source.under(role(source))
    name = said.text("strategy_args.strategy_name") or "megatron_train"
    checkpointing = not said.flag("model_args.disable_gradient_checkpointing")
    if not name.startswith("megatron"):
        return {"policy.recompute": "full"} if checkpointing else {}
    start = role(source) + "strategy_args.strategy_config"
    options = source.under(start + ".")
    found: dict[str, Any] = {}
    for key in options.keys(""):
        value = options.value(key)
        short = key.removeprefix("additional_configs.")
        if short in _OPTIONS_OF_LAYOUT or value is None or short.startswith("recompute_"):
            continue
        if short in _OPTIONS_FIXED:
            options.fixed(key, SPREAD)
        elif short == "moe_layer_recompute":
            options.fixed(key, "off") if not value else found.update(
                {
                    "policy.megatron.transformer.recompute_granularity": "selective",
                    "policy.megatron.transformer.recompute_modules": ["moe"],
                }
            )
        else:
            shared.option(options, key, short, value, "policy.megatron", found)
    virtual = options.whole("virtual_pipeline_model_parallel_size")
    if virtual and virtual > 1:
        found["policy.megatron.pipeline.virtual_pipeline_model_parallel_size"] = virtual
    if checkpointing and options.text("recompute_granularity"):
        modules = options.text("recompute_modules")
        again = shared.recompute(source, start, "policy")
        if modules and "," in modules:
            again["policy.megatron.transformer.recompute_modules"] = [part.strip() for part in modules.split(",")]
        if again:
            found = {key: value for key, value in found.items() if "recompute" not in key} | again
    return found | {"policy.sequence_parallel": True}


def samples_a_group(source: Source) -> int:
    key = _INFER + "generating_args.num_return_sequences"
    return source.count(key if source.has(key) else "num_return_sequences_in_group")


def batch(source: Source) -> dict[str, Any]:
    said = source.under(role(source) + "training_args.")
    split, world = sizes(source), len(devices(source, role(source) + "device_mapping"))
    replicas = world // (split.get("tp", 1) * split.get("pp", 1) * split.get("cp", 1))
    update = said.count("per_device_train_batch_size") * said.count("gradient_accumulation_steps") * replicas
    if kind(source) != "rlvr":
        return {"data.prompts_per_step": update}
    prompts, group = source.count("rollout_batch_size"), samples_a_group(source)
    updates, rest = divmod(prompts * group, update)
    if rest or updates < 1 or prompts % updates:
        said.lacks(
            "gradient_accumulation_steps",
            f"updates of {update} samples of a step's {prompts} x {group}: whole prompts must make an update",
        )
        updates = 1
    return {"data.prompts_per_step": prompts, "algorithm.updates_per_step": updates, "algorithm.group_size": group}


def lengths(source: Source) -> dict[str, Any]:
    said = source.under(role(source))
    if kind(source) == "rlvr":
        prompt, response = source.count("prompt_length"), source.count("response_length")
    else:
        prompt = response = source.count("sequence_length")
    longest = (prompt + response) * (2 if kind(source) == "dpo" else 1)
    if said.flag("use_dynamic_batching_in_train"):
        tokens = said.whole("max_tokens_per_microbatch_in_train") or 0
    else:
        tokens = said.count("training_args.per_device_train_batch_size") * (prompt + response)
    return {
        "data.max_prompt_tokens": prompt,
        "data.max_response_tokens": response,
        "policy.tokens_per_micro_batch": max(tokens, longest),
        "data.train": shared.files(source, role(source) + "data_args.file_name"),
        "data.val": shared.files(source, "validation.data_args.file_name"),
        "data.overlong_prompts": "drop" if kind(source) == "rlvr" else "refuse",
    }


def method(source: Source) -> dict[str, Any]:
    if kind(source) == "sft":
        return {"algorithm.name": "sft"} | {
            f"data.{ours}": source.text(theirs)
            for theirs, ours in (("prompt_key", "prompt_key"), ("response_key", "response_key"))
        }
    if kind(source) == "dpo":
        if source.flag("ipo"):
            source.lacks("ipo", "the loss IPO")
        return {
            "algorithm.name": "dpo",
            "algorithm.beta": source.number("beta"),
            "algorithm.label_smoothing": source.number("label_smoothing"),
            "data.prompt_key": source.text("prompt_key"),
            "data.chosen_key": source.text("chosen_key"),
            "data.rejected_key": source.text("rejected_key"),
        }
    name = source.text("adv_estimator") or "gae"
    found: dict[str, Any] = {
        "whiten": source.flag("whiten_advantages"),
        "advantage_clip": source.number("advantage_clip") or None,
        "overlong_filter": source.flag("max_len_mask"),
        "overlong_buffer": 0,
        "dynamic_sampling": False,
    }
    if source.flag("difficulty_mask") and samples_a_group(source) > 1:
        found |= {
            "difficulty_low": source.number("difficulty_low_threshold"),
            "difficulty_high": source.number("difficulty_high_threshold"),
        }
    masked = [key for key in ("max_len_mask", "difficulty_mask") if source.flag(key)]
    if masked and source.number("entropy_loss_coef"):
        source.lacks(masked[0], "responses without loss that the entropy still counts (actor_worker.py:128)")
    mean, deviation = source.text("norm_mean_type"), source.text("norm_std_type")
    if name == "grpo":
        mean = deviation = "group"
    elif source.text("reward_norm") in ("group", "batch"):
        mean = mean or source.text("reward_norm")
        deviation = deviation or (source.text("reward_norm") if source.flag("reward_scale") else None)
    if mean == "group":
        found |= {"advantage": "group", "normalize": deviation or "none"}
    elif mean is None and deviation is None:
        found |= {"advantage": "reward", "normalize": "none"}
    else:
        source.lacks("norm_mean_type", "rewards with the mean of the batch or of the whole run")
    if name == "gae":
        found |= {"name": "ppo", "credit": "gae", "gamma": source.number("gamma"), "lam": source.number("lambd")}
    elif name in ("reinforce", "grpo"):
        found |= {"name": "grpo" if name == "grpo" else "reinforce_plus_plus"}
        found |= {"credit": "response"} if name == "grpo" else {"credit": "discounted", "gamma": source.number("gamma")}
    else:
        source.lacks("adv_estimator", f"the advantage {name}: known here are gae, reinforce, grpo")
    if (bound := source.number("reward_clip")) and mean is not None:
        source.fixed(
            "reward_clip", "behind the normalization in a group, where no advantage of fewer than 100 samples is beyond 10"
        ) if bound >= 10 else source.lacks("reward_clip", "a bound of normalized rewards")
    elif bound:
        found["reward_clip"] = bound
    return {f"algorithm.{key}": value for key, value in found.items()}


def loss(source: Source) -> dict[str, Any]:
    if kind(source) != "rlvr":
        return {}
    ranged = source.flag("use_pg_clip_range")
    low, high = (
        (source.number("pg_clip_low"), source.number("pg_clip_high"))
        if ranged
        else (source.number("pg_clip"), source.number("pg_clip"))
    )
    level = {"token": "token", "seq": "sequence"}.get(source.text("importance_sampling") or "token")
    mean = source.text("loss_agg_mode") or "seq-mean-token-mean"
    if mean not in shared.AGGREGATES:
        source.lacks("loss_agg_mode", f"the mean {mean}: known here are {', '.join(shared.AGGREGATES)}")
    found: dict[str, Any] = {
        "surrogate": "ppo_clip",
        "clip_low": low,
        "clip_high": high,
        "importance_sampling_level": level,
        "aggregate": shared.AGGREGATES.get(mean),
        "dual_clip": 1 + 2 * (source.number("pg_clip") or 0.0) if source.flag("dual_clip_loss") else None,
        "entropy_coef": source.number("entropy_loss_coef"),
    }
    found |= variant(source)
    if found["dual_clip"] is not None and found["dual_clip"] <= 1 + (high or 0.0):
        source.lacks("dual_clip_loss", "a bound below that of the ratio")
    if source.flag("use_kl_loss") and source.number("kl_loss_coef"):
        found |= {"kl.place": "loss", "kl.estimator": "k3", "kl.coef": source.number("kl_loss_coef")}
    elif source.flag("add_token_level_kl") and source.number("init_kl_coef"):
        found |= {
            "kl.place": "reward",
            "kl.estimator": shared.ESTIMATORS.get(source.text("kl_penalty") or "kl", "k1"),
            "kl.coef": source.number("init_kl_coef"),
        }
        if (target := source.number("target_kl")) is not None:
            found |= {"kl.target": target, "kl.horizon": source.whole("kl_horizon")}
    else:
        found["kl.coef"] = 0.0
    return {f"algorithm.{key}": value for key, value in found.items()}


_WORKERS = ("roll.pipeline.rlvr.actor_worker.ActorWorker", "roll.pipeline.base_worker.ActorWorker")
"""With the loss that `loss` reads."""
_PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"


def variant(source: Source) -> dict[str, Any]:
    """What the worker ActorPGWorker has in the place of PPO's loss (actor_pg_worker.py); other workers do not read it."""
    said = source.under(_TRAIN)
    worker = said.text("worker_cls") or _WORKERS[0]
    if worker not in (*_WORKERS, _PG_WORKER):
        said.lacks("worker_cls", "a worker of your own, whose loss no key says")
    if worker != _PG_WORKER:
        return {}
    name = said.text("pg_variant")
    if name == "ppo":
        return {"importance_sampling_level": "token"}
    found: dict[str, Any] = {"importance_sampling_level": "token", "clip_low": None, "clip_high": None, "dual_clip": None}
    if name == "vanilla":
        return found | {"surrogate": "log_likelihood", "importance_sampling_level": None}
    if name == "tis":
        low, high = said.number("tis_lower_bound") or 0.0, said.number("tis_upper_bound") or 0.0
        if low > 1 or high < 1:
            said.lacks("tis_upper_bound", "bounds of the ratio that leave 1 out")
        return found | {"surrogate": "cispo", "clip_low": 1 - low, "clip_high": high - 1}
    if name == "topr":
        if (said.number("topr_positive_weight"), said.number("topr_negative_weight")) != (1.0, 1.0):
            said.lacks("topr_positive_weight", "weights of good and bad responses")
        if source.flag("whiten_advantages"):
            source.lacks("whiten_advantages", "TOPR by the sign of the reward, where whitening moves that of the advantage")
        return found | {"surrogate": "topr"}
    if name == "cispo":
        if said.flag("cispo_use_unified_mask"):
            said.lacks("cispo_use_unified_mask", "a mask besides the bounds of the weight")
        bounds = {side: said.number(f"cispo_epsilon_{side.removeprefix('clip_')}") for side in ("clip_low", "clip_high")}
        return found | {"surrogate": "cispo", **bounds}
    if name == "kimi15":
        # -A log π + τ/2 (log ρ)²
        tau = said.number("kimi15_tau") or 0.0
        return found | {"surrogate": "rec", "clip_mode": "none", "token_weight": "none", "proximal_coef": tau / 2}
    said.lacks("pg_variant", f"the loss {name}: known here are vanilla, ppo, tis, topr, cispo, kimi15")
    return found


def optimizer(source: Source, start: str = "", ours: str = "policy.optimizer") -> dict[str, Any]:
    said = source.under((start or role(source)) + "training_args.")
    style = said.text("lr_scheduler_type") or "linear"
    if style not in ("constant", "constant_with_warmup", "linear", "cosine"):
        said.lacks("lr_scheduler_type", f"the schedule {style}")
        style = "constant"
    steps, share = said.number("warmup_steps"), said.number("warmup_ratio")
    found = {
        "lr": said.number("learning_rate"),
        "weight_decay": said.number("weight_decay"),
        "betas": [said.number("adam_beta1"), said.number("adam_beta2")],
        "clip_grad": source.number("max_grad_norm"),
        "schedule": style.removesuffix("_with_warmup"),
        "warmup_steps": steps or share or 0,
        "warmup_from": 0,
    }
    return {f"{ours}.{key}": value for key, value in found.items()}


def critic(source: Source) -> dict[str, Any]:
    if kind(source) != "rlvr" or not uses_critic(source):
        return {}
    return {
        "critic.path": shared.path(source, "reward_pretrain"),
        "critic.value_clip": source.number("value_clip"),
    } | optimizer(source, "critic.", "critic.optimizer")


def engine(source: Source) -> dict[str, Any]:
    if kind(source) != "rlvr":
        return {}
    said = source.under(_INFER + "strategy_args.strategy_config.")
    trained, key = devices(source, _TRAIN + "device_mapping"), _INFER + "device_mapping"
    # Where the two have some GPUs in common, the engine shares all of the policy's.
    own = devices(source, key) if source.has(key) else []
    is_apart = bool(own) and not set(own) & set(trained)
    world = len(own if is_apart else trained)
    tp = said.whole("tensor_parallel_size") or said.whole("tp_size") or source.whole(_INFER + "num_gpus_per_worker") or 1
    if (name := source.text(_INFER + "strategy_args.strategy_name")) == "hf_infer":
        return {"engine.backend": "transformers"}
    found: dict[str, Any] = {"engine.backend": shared.engine_layout(world, tp if world % tp == 0 else 1)}
    if is_apart:
        found["engine.placement"] = "apart"
    found["engine.memory_fraction"] = said.number(
        "mem_fraction_static" if said.has("mem_fraction_static") else "gpu_memory_utilization"
    )
    if (longest := said.whole("max_model_len")) is not None:
        found["engine.max_model_len"] = max(longest, source.count("prompt_length") + source.count("response_length"))
    if name == "vllm" and said.has("enforce_eager"):
        found["engine.vllm.enforce_eager"] = said.flag("enforce_eager")
    drawn = source.under(_INFER + "generating_args.")
    if (drawn.whole("num_beams") or 1) != 1:
        drawn.lacks("num_beams", "beam search")
    return found | {
        "engine.sampling.temperature": drawn.number("temperature"),
        "engine.sampling.top_p": drawn.number("top_p"),
        "engine.sampling.top_k": max(0, drawn.whole("top_k") or 0),
    }


def rewards(source: Source) -> dict[str, Any]:
    if kind(source) != "rlvr":
        return {}
    domains = {key.split(".")[1] for key in source.keys("rewards.")}
    weights = {
        key.rpartition(".")[2]: source.number(key) for key in source.keys(_TRAIN + "data_args.domain_interleave_probs.")
    }
    if len([name for name, weight in weights.items() if weight]) > 1:
        for name in weights:
            source.lacks(f"{_TRAIN}data_args.domain_interleave_probs.{name}", "domains mixed by probability in each step")
    if domains - {"math_rule"}:
        for domain in sorted(domains - {"math_rule"}):
            if weights.get(domain, 1.0):
                for key in source.keys(f"rewards.{domain}."):
                    source.lacks(key, f"the reward of {domain}: reward.functions or reward.by_source name a function")
    columns = source.under(_TRAIN + "data_args.")
    found: dict[str, Any] = {
        "data.ground_truth_key": "ground_truth",
        "data.prompt_key": columns.text("messages") or columns.text("prompt"),
    }
    return found | ({"reward.functions": {"math": 1.0}} if "math_rule" in domains else {})


def run(source: Source) -> dict[str, Any]:
    resume, keep = source.text("resume_from_checkpoint") or "False", source.whole("max_ckpt_to_keep") or 0
    found: dict[str, Any] = {
        "trainer.run_dir": shared.path(source, "output_dir"),
        "trainer.seed": source.whole("seed"),
        "trainer.keep": keep or EVERY_CHECKPOINT,
        "trainer.resume": "never" if resume.lower() == "false" else resume,
        "trainer.save_every": source.whole("save_steps") or 0,
        "trainer.eval_every": (source.whole("eval_steps") or 0) if source.items("validation.data_args.file_name") else 0,
        "trainer.eval_before_train": False,
    }
    if kind(source) == "rlvr" or not source.number(role(source) + "training_args.num_train_epochs"):
        found["trainer.steps"] = source.whole("max_steps")
    else:
        found["trainer.epochs"] = source.whole(role(source) + "training_args.num_train_epochs")
    drawn = source.under("validation.generating_args.")
    if kind(source) == "rlvr" and drawn.number("temperature"):
        found |= {
            "eval.samples": drawn.whole("num_return_sequences"),
            "eval.temperature": drawn.number("temperature"),
            "eval.top_p": drawn.number("top_p"),
        }
        if (drawn.whole("top_k") or 0) > 0:
            drawn.lacks("top_k", "top-k in evaluation", changes_result=False)
    return found


def ahead(source: Source) -> dict[str, Any]:
    ratio = source.number("async_generation_ratio") or 0.0
    if ratio > 0 and not ratio.is_integer():
        source.lacks(
            "async_generation_ratio", "a part of a step that is sampled ahead: rollout.max_staleness counts whole ones"
        )
    return shared.ahead(int(ratio), "continue") if kind(source) == "rlvr" else {}


def model(source: Source) -> dict[str, Any]:
    own, reference = (source.text(f"{start}model_args.model_name_or_path") for start in (role(source), "reference."))
    found = {"model.path": own or shared.path(source, "pretrain")}
    return found | ({"reference.path": reference} if reference not in (None, found["model.path"]) else {})


def low_rank(source: Source) -> dict[str, Any]:
    """Adapters are there where lora_target is; its alpha is twice the rank when left out (model_args.py, __post_init__)."""
    said = f"{role(source)}model_args."
    if not source.texts(said + "lora_target"):
        return {}
    keys = {"rank": said + "lora_rank", "alpha": said + "lora_alpha", "targets": said + "lora_target"}
    found = adapters(source, "policy", path=said + "adapter_name_or_path", **keys)
    if found and found["policy.lora.alpha"] is None:
        found["policy.lora.alpha"] = 2.0 * found["policy.lora.rank"]
    refuse(source, said + "lora_dropout", "dropout of adapters", (0, 0.0))
    refuse(source, said + "additional_target", "weights that are trained beside adapters", ())
    return found


def _of(roles: str, names: str) -> str:
    return " ".join(f"{role}.{name}" for role in roles.split() for name in names.split())


_STRATEGY = "".join(
    f"**.strategy_args.strategy_config.{name} "
    for name in (
        *("fsdp_size", "efsdp_size", "ep_size", "param_dtype", "reduce_dtype", "offload_policy", "reshard_after_forward"),
        *("apply_expert_patch", "apply_tiled_mlp", "tiled_num_shards", "moe_use_grouped_mm", "use_batched_model_update"),
        "bf16",
    )
)
"""Of strategies other than Megatron's."""

SECTIONS = (
    Section.of(
        "Run",
        used("pretrain", "model.path"),
        used("output_dir", "trainer.run_dir"),
        used("seed", "trainer.seed"),
        used("max_steps", "trainer.steps", "Steps of the pipeline decide; num_train_epochs of RLVR is read nowhere."),
        used("save_steps", "trainer.save_every"),
        used("eval_steps validation.eval_steps", "trainer.eval_every"),
        used("resume_from_checkpoint", "trainer.resume"),
        used("max_ckpt_to_keep", "trainer.keep", "0 keeps all."),
        to("track_with", "trainer.loggers", shared.loggers),
        used("exp_name", "tracking.name"),
        used("tracker_kwargs.project tracker_kwargs.tags tracker_kwargs.group", "tracking"),
        fixed("tracker_kwargs.api_key", "the tracker's own variable has the key: none stands in our files"),
        fixed(
            "tracker_kwargs.** logging_dir logging_steps checkpoint_config.** "
            "system_envs.** rpc_* profiler_* defaults --config-name --config-path",
            SHOWN,
        ),
        fixed("hydra.**", "how the program is started", takes_any=True),
        fixed(
            "num_gpus_per_node num_nodes offload_nccl **.offload_nccl **.backend_timeout **.world_size "
            "**.num_gpus_per_worker model_update_buffer_size_mb is_num_return_sequences_expand",
            "device_mapping says how many GPUs there are",
        ),
        lacks(
            "-m",
            "another program",
            ["examples/start_rlvr_pipeline.py", "examples/start_sft_pipeline.py", "examples/start_dpo_pipeline.py"],
        ),
        used("reward_pretrain", "critic.path", "Where the critic starts."),
        fixed("global_template **.data_args.template", "the tokenizer's chat template"),
    ),
    Section.of(
        "Algorithm",
        used("adv_estimator", "algorithm.name algorithm.advantage algorithm.credit", "gae when left out, with λ 0.95."),
        used(
            "norm_mean_type norm_std_type reward_norm reward_scale",
            "algorithm.advantage algorithm.normalize",
            "grpo forces group and group.",
        ),
        fixed("reward_shift", "it has no effect on normalized rewards"),
        used("reward_clip", "algorithm.reward_clip", "ROLL's bound stands behind the normalization (functionals.py:666)."),
        used("whiten_advantages", "algorithm.whiten"),
        used("advantage_clip", "algorithm.advantage_clip"),
        used("gamma", "algorithm.gamma"),
        used("lambd", "algorithm.lam"),
        used("pg_clip pg_clip_low pg_clip_high use_pg_clip_range", "algorithm.clip_low algorithm.clip_high"),
        used("dual_clip_loss", "algorithm.dual_clip", "1 + 2 · pg_clip (actor_worker.py:85)."),
        used("importance_sampling", "algorithm.importance_sampling_level"),
        used(
            "loss_agg_mode",
            "algorithm.aggregate",
            "seq-mean-token-mean when left out. ROLL's token-mean sums what lies outside of the mask too "
            "(functionals.py:256); its seq-mean-token-sum-norm divides "
            "by the padded width and not by the samples: a factor that AdamW does not see but clipping does.",
        ),
        used(
            "use_kl_loss kl_loss_coef add_token_level_kl init_kl_coef kl_penalty target_kl kl_horizon",
            "algorithm.kl",
            "In the loss it is k3; in the reward only with add_token_level_kl.",
        ),
        used("entropy_loss_coef", "algorithm.entropy_coef"),
        to("ppo_epochs", "algorithm.ppo_epochs", lambda s, k: s.whole(k) if kind(s) == "rlvr" else None),
        used("value_clip", "critic.value_clip"),
        used("max_grad_norm", "policy.optimizer.clip_grad"),
        used("max_len_mask", "algorithm.overlong_filter"),
        used(
            "difficulty_mask difficulty_low_threshold difficulty_high_threshold",
            "algorithm.difficulty_low algorithm.difficulty_high",
            "By the mean score of a prompt, both bounds excluded (functionals.py:608).",
        ),
        lacks(
            "error_max_len_clip length_loss_weight difficulty_loss_weight use_topr* whiten_rewards",
            "ROLL's own weights of samples",
            [False],
        ),
        used(
            "actor_train.worker_cls actor_train.pg_variant actor_train.tis_lower_bound actor_train.tis_upper_bound "
            "actor_train.topr_positive_weight actor_train.topr_negative_weight actor_train.cispo_epsilon_low "
            "actor_train.cispo_epsilon_high actor_train.cispo_use_unified_mask actor_train.kimi15_tau",
            "algorithm.surrogate algorithm.clip_low algorithm.clip_high algorithm.dual_clip algorithm.clip_mode "
            "algorithm.token_weight algorithm.proximal_coef algorithm.importance_sampling_level",
            "With worker_cls ActorPGWorker, vanilla when left out: REINFORCE. TOPR divides good from bad by the reward "
            "there, by the advantage here: the same for rewards of 0 and 1.",
        ),
        fixed("pg_variant", "ROLL reads it under actor_train only"),
        lacks("rl_loss_coef", "a factor of the whole loss", [1, 1.0]),
        lacks("positive_loss_coef", "an imitation of good samples beside the policy loss", [0, 0.0]),
        lacks("actor_train.mtp_*", "multi-token prediction", [0]),
        fixed("token_level_loss", "ROLL reads it nowhere: loss_agg_mode decides"),
        fixed(
            "enable_old_logprobs_recompute force_disable_old_logprobs_recompute **.system_envs.** "
            "rollout_dump_dir render_save_dir world_size",
            "old log-probs are the trainer's, computed before the updates",
        ),
        lacks("tag_to_template.**", "chat templates by domain: the tokenizer's is used"),
        lacks(
            "student_infer.** agent_config_common.** *agent_template *agent_system_template reward_normalization.** "
            "max_tokens_per_step max_actions_per_traj batch_adjust_mode default_history_length reward_system_config.**",
            "environments and agents",
        ),
        fixed("error_max_len_threshold", "read with error_max_len_clip only"),
        lacks("train_infer_correction.**", "correction of the engine's log-probs: algorithm.rollout_correction", [False]),
        used(
            "async_generation_ratio",
            "rollout",
            "Whole ones are the same number and the same rule: (r + v + 1) x rollout_batch_size prompts have been begun "
            "when v steps are done, and a step takes the oldest first and waits for them (generate_scheduler.py:228, 347). "
            "Responses go on under new weights: interrupt: continue.",
        ),
        lacks("use_opd is_pure_opd *opd_* teacher.** student.** student_train.**", "learning from a teacher", [False]),
        lacks(
            "env_manager* custom_envs.** train_env_manager.** val_env_manager.** ratio_type step_reward_* episode_reward_*",
            "environments and agents",
        ),
        used("beta label_smoothing ipo", "algorithm.beta algorithm.label_smoothing"),
        used(
            "chosen_key rejected_key prompt_key response_key",
            "data.chosen_key data.rejected_key data.prompt_key data.response_key",
        ),
        fixed("query_key system_key", "the prompt is one column"),
    ),
    Section.of(
        "Batch and data",
        used(
            "rollout_batch_size num_return_sequences_in_group actor_infer.generating_args.num_return_sequences",
            "data.prompts_per_step algorithm.group_size",
            "Prompts, and samples of each.",
        ),
        used(
            _of(
                "actor_train sft_train",
                "training_args.per_device_train_batch_size training_args.gradient_accumulation_steps",
            ),
            "algorithm.updates_per_step policy.tokens_per_micro_batch data.prompts_per_step",
            "Their product and the replicas are the samples of an update (base_config.py:787).",
        ),
        used("prompt_length response_length sequence_length", "data.max_prompt_tokens data.max_response_tokens"),
        fixed("train_batch_size val_batch_size", "per_device_train_batch_size x gradient_accumulation_steps says it"),
        used(_of("actor_train sft_train", "data_args.file_name"), "data.train"),
        used("validation.data_args.file_name", "data.val"),
        used("actor_train.data_args.domain_interleave_probs.*", "reward.functions"),
        used(
            "actor_train.data_args.messages actor_train.data_args.prompt",
            "data.prompt_key",
            "The column of messages, which may be JSON in a text, goes before that of the prompt (rlvr_pipeline.py:90).",
        ),
        lacks("**.data_args.custom_data_kwargs_func", "a function that reads the data"),
        fixed(
            _of(
                "**.data_args",
                "interleave_probs dataset_dir dataset_type preprocessing_num_workers messages prompt response tag id "
                "file_name eval_file_name image_* video_* audio_folder",
            ),
            "how data are read",
        ),
        used("rewards.math_rule.**", "reward.functions", "Ground truths are in the column ground_truth."),
        used("rewards.**", "reward.functions", "math_rule is math; other domains need a function of reward.by_source."),
        used("validation.generating_args.*", "eval.samples eval.temperature eval.top_p"),
    ),
    Section.of(
        "Roles",
        used(_of("actor_train sft_train", "device_mapping"), "policy.backend", "Parsed, never evaluated."),
        used(
            _of("actor_train sft_train", "strategy_args.strategy_name"),
            "policy.backend",
            "deepspeed_train and fsdp2_train become data-parallel Megatron-Core on as many GPUs.",
        ),
        used(
            _of("actor_train sft_train", "strategy_args.strategy_config.*_parallel_size model_args.ulysses_size"),
            "policy.backend policy.megatron.pipeline",
        ),
        used(
            _of("actor_train", "strategy_args.strategy_config.**"),
            "policy.megatron policy.recompute policy.sequence_parallel",
        ),
        fixed(
            _of("actor_train sft_train", "strategy_args.strategy_config") + " sft_train.strategy_args.strategy_config.**",
            SPREAD,
        ),
        used(_of("actor_train sft_train", "model_args.disable_gradient_checkpointing"), "policy.recompute"),
        lacks(
            _of("actor_train sft_train", "model_args.dtype"), "training in another type: policy.dtype", ["bf16", "bfloat16"]
        ),
        *(
            used(_of("actor_train sft_train", f"model_args.{theirs}"), f"policy.lora.{ours}", note)
            for theirs, ours, note in (
                ("lora_rank", "rank", "With lora_target; 8 when left out."),
                ("lora_alpha", "alpha", "Twice the rank when left out."),
                ("lora_target", "target_modules", ""),
                ("adapter_name_or_path", "path", "Its r and lora_alpha must be those set here."),
                ("lora_dropout", "rank", "Another one than 0 is refused."),
                ("additional_target", "rank", "Refused where it names something."),
            )
        ),
        lacks("critic.model_args.lora_target", "adapters of the critic: critic.lora has them", []),
        fixed("**.model_args.lora_* lora_* lora_rank lora_target lora_alpha", "the engine is given the merged weights"),
        lacks("actor_train.model_args.model_type", "other models than language models"),
        lacks("**.model_args.model_config_kwargs.**", "changes of config.json"),
        lacks("**.model_args.moe_aux_loss_coef", "balancing of experts by loss", [0, 0.0]),
        lacks("actor_train.model_args.freeze_module_prefix", "parts of the model that do not learn"),
        used(_of("actor_train sft_train", "model_args.model_name_or_path"), "model.path"),
        used("reference.model_args.model_name_or_path", "reference.path"),
        fixed(
            _of(
                "**.model_args",
                "attn_implementation flash_attn dtype disable_gradient_checkpointing model_type model_name_or_path "
                "gradient_checkpointing_use_reentrant device_map num_labels autocast_adapter_dtype additional_target "
                "adapter_name_or_path ulysses_size freeze_module_prefix",
            ),
            KERNELS,
        ),
        *(
            row
            for start in ("actor_train", "sft_train")
            for rows in (
                used(f"{start}.training_args.learning_rate", "policy.optimizer.lr", "5e-5 when left out."),
                used(f"{start}.training_args.weight_decay", "policy.optimizer.weight_decay"),
                used(
                    f"{start}.training_args.warmup_steps {start}.training_args.warmup_ratio",
                    "policy.optimizer.warmup_steps",
                    "Optimizer steps, the first with rate 0, as torch's schedulers: warmup_from: 0.",
                ),
                used(
                    f"{start}.training_args.lr_scheduler_type",
                    "policy.optimizer.schedule",
                    "linear when left out: the rate falls to 0 over the run.",
                ),
                used(f"{start}.training_args.adam_beta*", "policy.optimizer.betas"),
            )
            for row in rows
        ),
        used(_of("actor_train sft_train", "training_args.num_train_epochs"), "trainer.epochs"),
        fixed(_of("actor_train sft_train", "training_args.*"), "of transformers' trainer, which does not run"),
        used(
            _of("actor_train sft_train", "use_dynamic_batching_in_train max_tokens_per_microbatch_in_train"),
            "policy.tokens_per_micro_batch",
        ),
        fixed(
            _of(
                "actor_train sft_train",
                "infer_batch_size use_dynamic_batching_in_infer max_tokens_per_microbatch_in_infer "
                "sequence_length_round_in_* use_remove_padding use_sequence_packing sequence_packing_args.** "
                "logits_in_fp32 apply_loss_scale",
            ),
            "no cut changes the numbers",
        ),
        lacks(_of("actor_train", "router_replay.mode"), "replaying the routing of experts", ["disabled"]),
        fixed("actor_train.router_replay.*", "read with its mode only"),
        used("critic.training_args.*", "critic.optimizer"),
        used(
            "reference.strategy_args.strategy_name reference.strategy_args.strategy_config.*_parallel_size "
            "critic.strategy_args.strategy_name critic.strategy_args.strategy_config.*_parallel_size",
            "reference.backend critic.backend reference.megatron.pipeline critic.megatron.pipeline",
            "Of Megatron, on the policy's ranks whatever their device_mapping says. The policy's where nothing is said, "
            "with another strategy, or where the ranks cannot be divided so.",
        ),
        fixed("critic.**", "it has the policy's ranks and settings"),
        fixed("reference.** reference_configs.**", "the reference has the policy's ranks, and only computes"),
        used(
            _of(
                "actor_infer",
                "strategy_args.strategy_name strategy_args.strategy_config.tensor_parallel_size "
                "strategy_args.strategy_config.tp_size num_gpus_per_worker",
            ),
            "engine.backend",
            "sglang becomes vLLM.",
        ),
        used(
            "actor_infer.device_mapping",
            "engine.backend engine.placement",
            "GPUs of its own are those behind the policy's; where some are shared, the policy's.",
        ),
        used(
            _of(
                "actor_infer",
                "strategy_args.strategy_config.gpu_memory_utilization strategy_args.strategy_config.mem_fraction_static",
            ),
            "engine.memory_fraction",
        ),
        used("actor_infer.strategy_args.strategy_config.max_model_len", "engine.max_model_len"),
        used("actor_infer.strategy_args.strategy_config.enforce_eager", "engine.vllm"),
        used(
            "actor_infer.generating_args.temperature actor_infer.generating_args.top_p "
            "actor_infer.generating_args.top_k actor_infer.generating_args.num_beams",
            "engine.sampling",
            "top_k is 50 when left out. ROLL's trainer does not divide logits by the temperature, ours does: "
            "ratios compare the distribution that was sampled from.",
        ),
        fixed("actor_infer.generating_args.max_new_tokens", "response_length says it"),
        fixed("actor_infer.generating_args.logprobs", "log-probs are always recorded"),
        fixed("actor_infer.generating_args.length_penalty", "read with beams only"),
        lacks("actor_infer.generating_args.do_sample", "the most likely tokens: temperature 0", [True]),
        lacks("actor_infer.generating_args.*", "another way of sampling"),
        lacks("actor_infer.generating_args.repetition_penalty", "engine.sampling.repetition_penalty", [1, 1.0]),
        fixed("actor_infer.**", KERNELS),
        fixed(
            "**.strategy_args.strategy_config.additional_configs.** **.strategy_args.strategy_config.wrap_policy.*",
            SPREAD,
            takes_any=True,
        ),
        fixed(_STRATEGY + "**.strategy_args.strategy_config.** **.strategy_args.** validation.**", SPREAD),
    ),
)

tracked = shared.tracked(
    "track_with", "tracker_kwargs.project", "exp_name", group="tracker_kwargs.group", tags="tracker_kwargs.tags"
)

DERIVED = (
    ahead,
    model,
    low_rank,
    method,
    loss,
    batch,
    lengths,
    layout,
    megatron,
    optimizer,
    critic,
    engine,
    rewards,
    run,
    tracked,
)

TABLE = Table(
    "ROLL",
    SECTIONS,
    DERIVED,
    DEFAULTS,
    command="`fivefold train --from roll --config_path DIR --config_name FILE`, as `python "
    "examples/start_rlvr_pipeline.py`.",
    loses=(
        "domains that are mixed by probability, judges and sandboxes as rewards",
        "environments and agents",
    ),
    gains=(
        "device mappings that are parsed instead of evaluated",
        "keys of every section that are checked: ROLL drops unknown ones",
        "a token mean that counts response tokens only",
    ),
    known=known("roll"),
)

translate = dialect(TABLE)
