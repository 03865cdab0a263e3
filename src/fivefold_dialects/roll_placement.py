"""Translate ROLL's roles (which model trains or samples on which GPUs), layouts, Megatron-Core options and engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold_dialects import shared, trainers
from fivefold_dialects.device_mapping import parse_devices, ranks_after
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.table import fields, listed, load

TRAIN, INFER = "actor_train.", "actor_infer."


def kind(source: Source) -> str:
    """Return the kind of the run, rlvr, sft or dpo, by the sections that it has."""
    if source.keys("sft_train."):
        return "sft"
    return "dpo" if source.has("chosen_key") else "rlvr"


def is_rlvr(source: Source) -> bool:
    return kind(source) == "rlvr"


FIELDS = fields("roll", {"is_rlvr": is_rlvr})


def role(source: Source) -> str:
    return "sft_train." if kind(source) == "sft" else TRAIN


def devices(source: Source, key: str) -> list[int]:
    """Return the GPUs of a `device_mapping`."""
    try:
        return parse_devices(source.raw(key))
    except ValueError as error:
        raise UnreadableError(f"{key} {error}") from None


def uses_critic(source: Source) -> bool:
    return is_rlvr(source) and source.text("adv_estimator") in (None, "gae")


def samples_a_group(source: Source) -> int:
    return source.count(source.first(INFER + "generating_args.num_return_sequences", "num_return_sequences_in_group"))


def sizes(source: Source) -> dict[str, int]:
    section = source.under(role(source))
    name = section.text("strategy_args.strategy_name") or "megatron_train"
    if not name.startswith("megatron"):
        return {"cp": section.whole("model_args.ulysses_size") or 1}
    return shared.parallel_sizes(section.under("strategy_args.strategy_config."))


def layout(source: Source) -> dict[str, Any]:
    """Return our keys of the layouts of the policy and of other models, on their own GPUs or on the policy's."""
    trained = devices(source, role(source) + "device_mapping")
    policy = shared.world_layout(len(trained), **sizes(source))
    ours: dict[str, Any] = {"policy.backend": str(policy)}
    if source.text(role(source) + "strategy_args.strategy_name") == "fsdp2_train":
        ours = trainers.fsdp(source, len(trained), role(source) + "strategy_args.strategy_config.", cp=policy.cp)
        policy = replace(policy, backend="fsdp")
    # The reference comes last: without a KL it is absent, and must not leave empty ranks before other models.
    is_used = {"critic": uses_critic(source), "reference": kind(source) != "sft"}
    placed = [name for name in (*is_used, "actor_infer") if source.has(f"{name}.device_mapping")]
    gpus = {name: devices(source, f"{name}.device_mapping") for name in placed}
    sampled = gpus.pop("actor_infer", [])
    first_ranks = ranks_after(trained, sampled, {name: numbers for name, numbers in gpus.items() if is_used[name]})
    if first_ranks and is_rlvr(source) and source.text(INFER + "strategy_args.strategy_name") != "hf_infer":
        ours["engine.mode"] = "server"
    for name in (name for name, uses in is_used.items() if uses):
        if name in gpus and name not in first_ranks and set(gpus[name]) != set(trained):
            source.fixed(f"{name}.device_mapping", "the model shares all of the policy's ranks, not a part of them")
        strategy = source.under(f"{name}.strategy_args.")
        is_megatron = (strategy.text("strategy_name") or "").startswith("megatron")
        own_sizes = shared.parallel_sizes(strategy.under("strategy_config.")) if is_megatron else {}
        different = shared.own_layout(policy, **own_sizes) if is_megatron else None
        if name in first_ranks:
            backend = "megatron" if is_megatron else policy.backend
            different = str(shared.world_layout(len(gpus[name]), backend, **own_sizes))
            ours[f"{name}.first_rank"] = first_ranks[name]
        if different is not None:
            ours[f"{name}.backend"] = different
            ours |= shared.virtual_stages(strategy.under("strategy_config."), name) if is_megatron else {}
    return ours


_OPTIONS_OF_LAYOUT, _OPTIONS_FIXED = listed("roll", "layout"), listed("roll", "spread")
_OPTIONS_CARRIED = load("roll")["carried"]


def megatron(source: Source) -> dict[str, Any]:
    section = source.under(role(source))
    name = section.text("strategy_args.strategy_name") or "megatron_train"
    checkpointing = not section.flag("model_args.disable_gradient_checkpointing")
    if not name.startswith("megatron"):
        return {"policy.recompute": "full"} if checkpointing else {}
    start = role(source) + "strategy_args.strategy_config"
    options = source.under(start + ".")
    values: dict[str, Any] = {}
    for key in options.keys(""):
        value = options.value(key)
        short = key.removeprefix("additional_configs.")
        if short in _OPTIONS_OF_LAYOUT or value is None or short.startswith("recompute_"):
            continue
        if short in _OPTIONS_FIXED:
            options.fixed(key, shared.TEXTS["spread"])
        elif short in _OPTIONS_CARRIED:
            options.fixed(key, "off") if not value else values.update({f"policy.megatron.{_OPTIONS_CARRIED[short]}": value})
        elif short == "moe_layer_recompute":
            options.fixed(key, "off") if not value else values.update(FIELDS["moe_layer_recompute"](source))
        else:
            shared.option(options, key, short, value, "policy.megatron", values)
    values |= shared.virtual_stages(options, "policy")
    if not options.text("recompute_granularity"):
        section.fixed("model_args.disable_gradient_checkpointing", "read with recompute_granularity only")
    elif checkpointing:
        modules = options.text("recompute_modules")
        again = shared.recompute(source, start, "policy")
        if modules and "," in modules:
            again["policy.megatron.transformer.recompute_modules"] = [part.strip() for part in modules.split(",")]
        if again:
            values = {key: value for key, value in values.items() if "recompute" not in key} | again
    # ROLL's converter takes the coefficient of the routers' loss from config.json unless one of two keys has it
    # (model_providers.py:456).
    coef, ours = section.number("model_args.moe_aux_loss_coef"), "policy.megatron.transformer.moe_aux_loss_coeff"
    if coef is not None and ours not in values:
        values[ours] = coef
    return values | {"policy.sequence_parallel": True, "policy.router_balance": "config"}


def forwards(source: Source) -> dict[str, Any]:
    """Return our keys of the sequences in a pass without gradient, for each model; with dynamic batches tokens limit it."""
    sections = {"policy": TRAIN, "reference": "reference."} if kind(source) != "sft" else {}
    if uses_critic(source):
        sections["critic"] = "critic."
    return {
        f"{ours}.sequences_per_forward": source.count(f"{start}infer_batch_size")
        for ours, start in sections.items()
        if source.has(f"{start}infer_batch_size") and not source.flag(f"{start}use_dynamic_batching_in_infer")
    }


def engine(source: Source) -> dict[str, Any]:
    config = source.under(INFER + "strategy_args.strategy_config.")
    trained, key = devices(source, TRAIN + "device_mapping"), INFER + "device_mapping"
    # If engine and policy have GPUs in common, the engine shares all GPUs of the policy.
    sampled = devices(source, key) if source.has(key) else []
    is_apart = bool(sampled) and not set(sampled) & set(trained)
    world = len(sampled if is_apart else trained)
    tp = config.whole("tensor_parallel_size") or config.whole("tp_size") or source.whole(INFER + "num_gpus_per_worker") or 1
    if (name := source.text(INFER + "strategy_args.strategy_name")) == "hf_infer":
        return {"engine.backend": "transformers"}
    ours = shared.engine_name(source, INFER + "strategy_args.strategy_name", name)
    values = shared.engine(world, tp if world % tp == 0 else 1, name=ours, is_apart=is_apart)
    values["engine.memory_fraction"] = config.number(
        "mem_fraction_static" if config.has("mem_fraction_static") else "gpu_memory_utilization"
    )
    if (longest := config.whole("max_model_len")) is not None:
        values["engine.max_model_len"] = max(longest, source.count("prompt_length") + source.count("response_length"))
    if name == "vllm" and config.has("enforce_eager"):
        values["engine.vllm.enforce_eager"] = config.flag("enforce_eager")
    drawn = source.under(INFER + "generating_args.")
    if (drawn.whole("num_beams") or 1) != 1:
        drawn.lacks("num_beams", "beam search")
    return values | FIELDS["sampling"](drawn)
