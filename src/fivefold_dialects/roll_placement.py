"""Translate ROLL's roles (which model trains or samples on which GPUs), layouts, Megatron-Core options and engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fivefold.config.mcore_options import is_option, section_of
from fivefold_dialects import shared, trainers
from fivefold_dialects.device_mapping import parse_devices, ranks_after
from fivefold_dialects.known import known
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


def is_megatron(section: Source) -> bool:
    """Return whether the strategy of a role is Megatron-Core, which it is by default."""
    return (section.text("strategy_args.strategy_name") or "megatron").startswith("megatron")


def sizes(section: Source) -> dict[str, int]:
    if not is_megatron(section):
        return {"cp": section.whole("model_args.ulysses_size") or 1}
    return shared.parallel_sizes(section.under("strategy_args.strategy_config."))


def samples_an_update(source: Source, start: str) -> int:
    """Return how many samples an update of a trained role takes: those of its GPUs, or of the policy's if it names none."""
    section, policy = source.under(start), role(source)
    world = len(devices(source, (start if section.has("device_mapping") else policy) + "device_mapping"))
    replicas = world // math.prod(size for name, size in sizes(section).items() if name in ("tp", "pp", "cp"))
    training = section.under("training_args.")
    return training.count("per_device_train_batch_size") * training.count("gradient_accumulation_steps") * replicas


def others(source: Source) -> dict[str, bool]:
    """Return the models other than the policy and whether the run uses them."""
    # The reference comes last: without a KL it is absent, and must not leave empty ranks before other models.
    return {"critic": uses_critic(source), "reference": kind(source) != "sft"}


def layout(source: Source) -> dict[str, Any]:
    """Return our keys of the layouts of the policy and of other models, on their own GPUs or on the policy's."""
    start = role(source)
    trained, config = devices(source, start + "device_mapping"), start + "strategy_args.strategy_config."
    policy = shared.world_layout(len(trained), **sizes(source.under(start)))
    ours: dict[str, Any] = {"policy.backend": str(policy)}
    if source.text(start + "strategy_args.strategy_name") == "fsdp2_train":
        ours = trainers.fsdp(source, len(trained), config, cp=policy.cp)
        policy = replace(policy, backend="fsdp")
    used = [name for name, is_used in others(source).items() if is_used]
    gpus = {name: devices(source, f"{name}.device_mapping") for name in used if source.has(f"{name}.device_mapping")}
    first_ranks = ranks_after(trained, apart(source), gpus)
    if first_ranks and is_rlvr(source) and source.text(INFER + "strategy_args.strategy_name") != "hf_infer":
        ours["engine.mode"] = "server"
    for name in used:
        if name in gpus and name not in first_ranks and set(gpus[name]) != set(trained):
            source.fixed(f"{name}.device_mapping", "the model shares all of the policy's ranks, not a part of them")
        section = source.under(f"{name}.")
        of_megatron = section.has("strategy_args.strategy_name") and is_megatron(section)
        if name in first_ranks:
            layout = ("megatron", sizes(section)) if of_megatron else (policy.backend, {})
            ours[f"{name}.backend"] = str(shared.world_layout(len(gpus[name]), layout[0], **layout[1]))
            ours[f"{name}.first_rank"] = first_ranks[name]
        elif of_megatron:
            ours |= shared.role_layout(section.under("strategy_args.strategy_config."), name, policy)
    return ours


_LAYOUT, _FIXED, _OVERRIDDEN = (listed("roll", name) for name in ("layout", "spread", "overridden"))
_CARRIED = load("roll")["carried"]
_MORE = "additional_configs."


def options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Return our keys of a role's recomputation and options of Megatron-Core, of which some are below additional_configs."""
    section, place = source.under(start), start + "strategy_args.strategy_config"
    checkpointing = not section.flag("model_args.disable_gradient_checkpointing")
    if not is_megatron(section):
        return {f"{ours}.recompute": "full" if checkpointing else "none"}
    config, values = source.under(place + "."), dict[str, Any]()
    # ROLL's own arguments come first.
    keys = [key for key in sorted(config.keys(""), key=lambda key: _MORE not in key) if config.value(key) is not None]
    named = {key.removeprefix(_MORE): key for key in keys if key.removeprefix(_MORE) not in _OVERRIDDEN or _MORE not in key}
    for key in (key for key in keys if key not in named.values()):
        config.fixed(key, "an argument of ROLL's own with this name replaces it, by its default too")
    for name, key in named.items():
        value = config.value(key)
        if key == _MORE[:-1]:
            config.lacks(key, "options in another file or in one text: write them below this key")
        elif name in _LAYOUT and key != name:
            config.lacks(key, "a size of the layout: write it directly below strategy_config")
        elif name in _LAYOUT or name.startswith("recompute_"):
            continue
        elif name in _FIXED:
            config.fixed(key, shared.TEXTS["spread"])
        elif name in _CARRIED:
            config.fixed(key, "off") if not value else values.update({f"{ours}.megatron.{_CARRIED[name]}": value})
        elif name == "moe_layer_recompute":
            again = {"granularity": "selective", "modules": ["moe"]} if value else {}
            values |= {f"{ours}.megatron.transformer.recompute_{part}": of for part, of in again.items()}
        elif key == name and f"{place}.{name}" not in known("roll"):
            if is_option(section_of(name), name):
                config.lacks(key, "ROLL has no such argument: write it below additional_configs")
        else:
            shared.option(config, key, name, value, f"{ours}.megatron", values)
    values |= shared.virtual_stages(config, ours)
    if "recompute_granularity" not in named and ours != "reference":
        section.fixed("model_args.disable_gradient_checkpointing", "read with recompute_granularity only")
    elif "recompute_granularity" in named and checkpointing:
        written = {f"{place}.{name}": config.raw(key) for name, key in named.items()}
        alike = replace(source, settings={**source.settings, **written})
        modules, again = alike.text(f"{place}.recompute_modules"), shared.recompute(alike, place, ours)
        if modules and "," in modules:
            again[f"{ours}.megatron.transformer.recompute_modules"] = [part.strip() for part in modules.split(",")]
        if again:
            values = {key: value for key, value in values.items() if "recompute" not in key} | again
    # ROLL's converter takes the coefficient of the routers' loss from config.json unless one of two keys has it
    # (model_providers.py:456).
    coef, ours_of_it = section.number("model_args.moe_aux_loss_coef"), f"{ours}.megatron.transformer.moe_aux_loss_coeff"
    return ({} if coef is None else {ours_of_it: coef}) | values


def megatron(source: Source) -> dict[str, Any]:
    """Return our keys of the options of the policy, and of other models that have a strategy of their own."""
    of_policy = options(source, role(source), "policy")
    balance = {"policy.sequence_parallel": True, "policy.router_balance": "config"}
    ours = {**of_policy, **(balance if is_megatron(source.under(role(source))) else {})}
    for name in (name for name, is_used in others(source).items() if is_used and source.keys(f"{name}.strategy_args.")):
        of_model = options(source, f"{name}.", name)
        ours |= shared.own_options(of_model, of_policy, name, trains=name == "critic")
    return ours


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


def apart(source: Source) -> list[int]:
    """Return the engine's own GPUs; none if one of them is the policy's: then the engine shares all GPUs of the policy."""
    key, trained = INFER + "device_mapping", set(devices(source, role(source) + "device_mapping"))
    sampled = devices(source, key) if source.has(key) else []
    if (shared_gpus := set(sampled) & trained) and set(sampled) != trained:
        source.note(f"{key} shares {len(shared_gpus)} GPUs with the policy: here the engine has the policy's {len(trained)}")
    return [] if shared_gpus else sampled


def engine(source: Source) -> dict[str, Any]:
    config = source.under(INFER + "strategy_args.strategy_config.")
    sampled = apart(source)
    world = len(sampled or devices(source, TRAIN + "device_mapping"))
    tp = config.whole("tensor_parallel_size") or config.whole("tp_size") or source.whole(INFER + "num_gpus_per_worker") or 1
    if (name := source.text(INFER + "strategy_args.strategy_name")) == "hf_infer":
        return {"engine.backend": "transformers"}
    ours = shared.engine_name(source, INFER + "strategy_args.strategy_name", name)
    values = shared.engine(world, tp if world % tp == 0 else 1, name=ours, is_apart=bool(sampled))
    values["engine.memory_fraction"] = config.number(
        "mem_fraction_static" if config.has("mem_fraction_static") else "gpu_memory_utilization"
    )
    if (longest := config.whole("max_model_len")) is not None:
        values["engine.max_model_len"] = max(longest, source.count("prompt_length") + source.count("response_length"))
    if name == "vllm" and config.has("enforce_eager"):
        values["engine.vllm.enforce_eager"] = config.flag("enforce_eager")
    drawn = source.under(INFER + "generating_args.")
    return values | FIELDS["sampling"](drawn)
