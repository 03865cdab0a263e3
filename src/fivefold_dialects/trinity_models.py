"""Translate Trinity-RFT's GPUs, engine and models: optimizers, layouts, memory and weights of policy, reference, critic.

Source: the wheels trinity-rft 0.1.0 to 0.6.0 (verl_config.py, synchronize_config; fsdp_workers.py; megatron_workers.py).
"""

from __future__ import annotations

import math
from typing import Any

from fivefold_dialects import shared, trainers
from fivefold_dialects.legacy import trinity as legacy
from fivefold_dialects.source import Source, UnreadableError, finite
from fivefold_dialects.trinity_data import FIELDS, lengths
from fivefold_dialects.trinity_keys import ACTOR, CRITIC, REFERENCE, ROLLOUT, VERL, is_megatron, period, periods, samples
from fivefold_dialects.trinity_method import uses_critic, uses_reference


def dtype(section: Source, key: str) -> str | None:
    """Return a model's data type; None for bfloat16, our default."""
    name = shared.dtype(section, key)
    return None if name == "bfloat16" else name


def engine(source: Source) -> dict[str, Any]:
    rollout = source.under(ROLLOUT)
    tp = rollout.count("tensor_parallel_size")
    name = shared.engine_name(rollout, "engine_type", rollout.text("engine_type"))
    return {
        **shared.engine(rollout.count("engine_num") * tp, tp, name=name, is_apart=True),
        **FIELDS["engine"](rollout),
        **FIELDS["sampling"](source),
        "engine.dtype": dtype(rollout, "dtype"),
        **(FIELDS["vllm"](rollout) if name == "vllm" else {}),
    }


def low_rank(source: Source) -> dict[str, Any]:
    """Return our keys of the adapter in model.lora_configs; rank, alpha and modules have Trinity's defaults (LoRAConfig)."""
    key = "model.lora_configs"
    if not source.has(key) or not (entries := source.items(key)):
        return {}
    if len(entries) > 1 or not isinstance(entries[0], dict):
        source.lacks(key, "more than one adapter")
        return {}
    adapter = Source(entries[0], {"lora_rank": 32, "lora_alpha": 32, "target_modules": "all-linear"}, source.environment)
    ours = shared.adapters(adapter, "policy", "trinity")
    if adapter.outcomes or adapter.value("is_dummy"):
        source.lacks(key, "adapters for the sampler only, or with a pattern of module names")
    return ours


def optimizer(source: Source) -> dict[str, Any]:
    """Return our keys of the policy's optimizer, from algorithm.optimizer or from verl's keys if only those are set."""
    new, old = source.under("algorithm.optimizer."), source.under(ACTOR + "optim.")

    def of(key: str) -> Source:
        return old if old.has(key) and not new.has(key) else new

    style = new.text("warmup_style") or (old.text("warmup_style") if old.has("warmup_style") else None)
    style = style or of("lr_scheduler_type").text("lr_scheduler_type")
    lowest = (of("lr").number("lr") or 0.0) * (of("min_lr_ratio").number("min_lr_ratio") or 0.0)
    ours = FIELDS["optimizer"](source)
    ours |= _warmup(source, of("lr_warmup_steps"), of("lr_warmup_steps_ratio"))
    if is_megatron(source):
        floor = lowest if source.text(legacy.RELEASE) in (None, "2026-02") else 0.0
        ours["clip_grad"] = of("clip_grad").number("clip_grad")
        ours |= _of_megatron(old, old.text("lr_decay_style") or style, ours["warmup_steps"], floor, lowest)
    else:
        ours |= FIELDS["clip"](source)
        ours |= _schedule(new, style, lowest)
    return {f"policy.optimizer.{key}": value for key, value in ours.items()}


def _critic_optimizer(source: Source, optim: Source) -> dict[str, Any]:
    lr, release = optim.number("lr") or 0.0, source.text(legacy.RELEASE)
    ours = FIELDS["critic_optimizer"](optim) | {"lr": lr, **_warmup(source, optim, optim)}
    if is_megatron(source):
        ours["clip_grad"], floor = optim.number("clip_grad"), 0.01 * lr if release is None else 0.0
        ours |= _of_megatron(optim, optim.text("lr_decay_style"), ours["warmup_steps"], floor, floor)
    else:
        ours["clip_grad"] = source.number(source.first(CRITIC + "grad_clip", "trainer.grad_clip"))
        # lr_scheduler_type replaced warmup_style in 2026-02, when verl's workers stopped reading the latter.
        style = optim.text("lr_scheduler_type" if release in (None, "2026-02") else "warmup_style")
        ours |= _schedule(optim, style, (optim.number("min_lr_ratio") or 0.0) * lr)
    return {f"critic.optimizer.{key}": value for key, value in ours.items()}


def _warmup(source: Source, of_steps: Source, of_share: Source) -> dict[str, Any]:
    """Return our keys of verl's warm-up: a number or share of the run's steps, the first with learning rate 0."""
    steps, share = of_steps.whole("lr_warmup_steps"), of_share.number("lr_warmup_steps_ratio")
    return {
        "schedule_per": "step" if period(source) == 1 else "update",
        "warmup_from": 0,
        "warmup_steps": steps if steps is not None and steps >= 0 else share or 0,
    }


def _schedule(optim: Source, style: str | None, lowest: float) -> dict[str, Any]:
    if style not in (None, "constant", "cosine"):
        optim.lacks("lr_scheduler_type", f"the schedule {style}")
    return {"schedule": "cosine", "min_lr": lowest} if style == "cosine" else {"schedule": "constant"}


def _of_megatron(optim: Source, style: str | None, warmup: float, floor: float, lowest: float) -> dict[str, Any]:
    """Return our keys of Megatron's schedule; `floor` and `lowest` are the defaults of lr_warmup_init and min_lr."""
    ours: dict[str, Any] = {"betas": [0.9, 0.999], "schedule": style if style in ("linear", "cosine") else "constant"}
    if style not in (None, "constant", "linear", "cosine"):
        optim.lacks("lr_decay_style", f"the schedule {style}")
    begin, end = optim.number("lr_warmup_init", floor), optim.number("min_lr", lowest)
    if warmup:
        ours["warmup_init_lr"] = begin or None
    if ours["schedule"] != "constant":
        ours |= {"min_lr": end, "decay_steps": optim.whole("lr_decay_steps")}
    return ours


def critic(source: Source) -> dict[str, Any]:
    section = source.under(CRITIC)
    ours: dict[str, Any] = {
        **FIELDS["critic"](source),
        **_critic_optimizer(source, section.under("optim.")),
        **shared.own_options(_options(source, CRITIC, "critic"), _options(source, ACTOR, "policy"), "critic"),
        **_offload(source, CRITIC, "critic"),
    }
    legacy.critic_updates(source)
    if (section.whole("ppo_epochs") or 1) != (source.whole(ACTOR + "ppo_epochs") or 1):
        section.lacks("ppo_epochs", "the critic is trained in the policy's updates, so it needs as many passes")
    lengths_of_both = lengths(source)
    longest = lengths_of_both["data.max_prompt_tokens"] + lengths_of_both["data.max_response_tokens"]
    if section.has("use_dynamic_bsz") and not section.flag("use_dynamic_bsz"):
        ours["critic.tokens_per_micro_batch"] = (section.whole("ppo_micro_batch_size_per_gpu") or 1) * longest
    elif budget := section.whole("ppo_max_token_len_per_gpu"):
        ours["critic.tokens_per_micro_batch"] = max(budget, longest)
    if (warmup := source.whole(VERL + "trainer.critic_warmup") or 0) > 1:
        if (warmup - 1) % period(source):
            source.lacks(VERL + "trainer.critic_warmup", "a warm-up of the critic that does not end at a sync")
        ours["critic.warmup_steps"] = periods(source, warmup - 1)
    return ours


def gpus(source: Source) -> int:
    """Return the number of the trainer's GPUs: all GPUs of the cluster except those that only sample."""
    total = source.count("cluster.node_num") * source.count("cluster.gpu_per_node")
    if (source.text("mode") or "both") != "both" or not samples(source):
        return total
    rest = total - source.count(ROLLOUT + "engine_num") * source.count(ROLLOUT + "tensor_parallel_size")
    for other in source.items("explorer.auxiliary_models"):
        numbers = other if isinstance(other, dict) else {"engine_num": 0}
        rest -= math.prod(int(finite(name, numbers.get(name, 1))) for name in ("engine_num", "tensor_parallel_size"))
    if rest < 1:
        raise UnreadableError(f"cluster.node_num x gpu_per_node = {total} leaves no GPU for the trainer next to the engines")
    return rest


def layout(source: Source) -> dict[str, Any]:
    """Return our keys of the policy's layout on the trainer's GPUs, and with Megatron of other models' own layouts."""
    world, megatron = gpus(source), source.under(ACTOR + "megatron.")
    if not is_megatron(source):
        cp = shared.ulysses(source.under("trainer."), source.under(ACTOR))
        return trainers.fsdp(source, world, ACTOR + "fsdp_config.", cp=cp)
    policy = shared.world_layout(world, **shared.parallel_sizes(megatron))
    ours = {"policy.backend": str(policy), "policy.sequence_parallel": megatron.flag("sequence_parallel")}
    ours |= shared.virtual_stages(megatron, "policy")
    others = {"reference": (REFERENCE, uses_reference(source)), "critic": (CRITIC, uses_critic(source))}
    for name, (start, is_there) in others.items():
        if is_there:
            ours |= shared.role_layout(source.under(start + "megatron."), name, policy)
    return ours


def memory(source: Source) -> dict[str, Any]:
    """Return our keys of data type, recomputation, Megatron-Core's options and offload, for policy and reference."""
    section = "megatron." if is_megatron(source) else "fsdp_config."
    ours = {**_options(source, ACTOR, "policy"), **_offload(source, ACTOR, "policy")}
    ours["policy.dtype"] = dtype(source, f"{ACTOR}{section}dtype")
    if uses_reference(source):
        options = _options(source, REFERENCE, "reference")
        ours |= shared.own_options(options, _options(source, ACTOR, "policy"), "reference", trains=False)
        # The reference's weights leave the GPU with the policy's.
        key = f"{section}param_offload"
        if source.flag(REFERENCE + key) and not source.flag(ACTOR + key):
            source.lacks(REFERENCE + key, shared.TEXTS["reference_alone"], changes_result=False)
    return ours


def _options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Return our keys of a model's recomputation and Megatron-Core options."""
    if not is_megatron(source):
        section = CRITIC + "model." if start == CRITIC else VERL + "actor_rollout_ref.model."
        return {f"{ours}.recompute": "full"} if source.flag(section + "enable_gradient_checkpointing") else {}
    options = start + "megatron.override_transformer_config"
    values = {**shared.recompute(source, options, ours), **shared.megatron_options(source, options, f"{ours}.megatron")}
    if (megatron := source.under(start + "megatron.")).flag("use_mbridge"):
        missing = {
            "value heads": start == CRITIC,
            "adapters": source.has("model.lora_configs"),
            "virtual stages": bool(shared.virtual_stages(megatron, ours)),
            "checkpoints of Megatron-Core": megatron.flag("use_dist_checkpointing"),
        }
        lacks = next((part for part, is_needed in missing.items() if is_needed), None)
        values |= shared.bridge(megatron, "use_mbridge", "mbridge", ours, lacks)
    return values | shared.options_of("ddp", source.under(start + "megatron.override_ddp_config."), ours)


def _offload(source: Source, start: str, ours: str) -> dict[str, Any]:
    section = "megatron." if is_megatron(source) else "model.fsdp_config." if start == CRITIC else "fsdp_config."
    return shared.offload(source, start + section, ours)


def weights(source: Source) -> dict[str, Any]:
    """Return our keys of models whose weights are a Megatron-Core checkpoint instead of the Hugging Face directory."""
    directory, has_reference = source.path("model.model_path"), uses_reference(source)
    roles = [
        ("model.path", ACTOR, "model.model_path", True),
        ("reference.path", REFERENCE, "model.model_path", has_reference),
        ("critic.path", CRITIC, "model.critic_model_path", uses_critic(source)),
    ]
    return shared.megatron_weights(source, directory, roles, has_reference)
