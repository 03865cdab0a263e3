"""Translate Trinity-RFT's GPUs, engine and models: optimizers, layouts, memory and weights of policy, reference, critic.

Source: the wheels trinity-rft 0.1.0 to 0.6.0 (verl_config.py, synchronize_config; fsdp_workers.py; megatron_workers.py).
"""

from __future__ import annotations

from typing import Any

from fivefold.layout import ParallelLayout
from fivefold_dialects import shared, trainers
from fivefold_dialects.legacy import trinity as legacy
from fivefold_dialects.source import Source, UnreadableError
from fivefold_dialects.trinity_data import FIELDS, lengths
from fivefold_dialects.trinity_keys import (
    ACTOR,
    CRITIC,
    MODEL,
    REFERENCE,
    ROLLOUT,
    TASKSET,
    VERL,
    is_megatron,
    kind,
    offline,
    period,
    periods,
)  # fmt: skip
from fivefold_dialects.trinity_method import kl, uses_critic


def uses_reference(source: Source) -> bool:
    return kind(source) == "dpo" or any(value for key, value in kl(source).items() if key.endswith("coef"))


def dtype(said: Source, key: str) -> str | None:
    """Return a model's data type; None for bfloat16, our default."""
    found = shared.dtype(said, key)
    return None if found == "bfloat16" else found


def engine(source: Source) -> dict[str, Any]:
    if offline(source):
        return {}
    said = source.under(ROLLOUT)
    tp = said.count("tensor_parallel_size")
    name = shared.engine_name(said, "engine_type", said.text("engine_type"))
    drawn = {
        name: source.number(key if source.value(key := f"{TASKSET}rollout_args.{name}") is not None else f"model.{name}")
        for name in ("temperature", "top_p", "top_k")
    }
    return {
        **shared.engine_apart(said.count("engine_num") * tp, tp, name=name),
        **FIELDS["engine"](said),
        "engine.sampling.temperature": drawn["temperature"],
        "engine.sampling.top_p": drawn["top_p"],
        "engine.sampling.top_k": max(0, int(drawn["top_k"] or 0)),
        "engine.dtype": dtype(said, "dtype"),
        **(FIELDS["vllm"](said) if name == "vllm" else {}),
    }


def low_rank(source: Source) -> dict[str, Any]:
    """Return our keys of the adapter in model.lora_configs; rank, alpha and modules have Trinity's defaults (LoRAConfig)."""
    key = "model.lora_configs"
    if not source.has(key) or not (entries := source.items(key)):
        return {}
    if len(entries) > 1 or not isinstance(entries[0], dict):
        source.lacks(key, "more than one adapter")
        return {}
    own = Source(entries[0], {"lora_rank": 32, "lora_alpha": 32, "target_modules": "all-linear"}, source.environment)
    found = shared.adapters(own, "policy", "trinity")
    if own.found or own.value("is_dummy"):
        source.lacks(key, "adapters for the sampler only, or with a pattern of module names")
    return found


def optimizer(source: Source) -> dict[str, Any]:
    """Return our keys of the policy's optimizer, from algorithm.optimizer or from verl's keys if only those are set."""
    new, old = source.under("algorithm.optimizer."), source.under(ACTOR + "optim.")

    def of(key: str) -> Source:
        return old if old.has(key) and not new.has(key) else new

    style = new.text("warmup_style") or (old.text("warmup_style") if old.has("warmup_style") else None)
    style = style or of("lr_scheduler_type").text("lr_scheduler_type")
    lowest = (of("lr").number("lr") or 0.0) * (of("min_lr_ratio").number("min_lr_ratio") or 0.0)
    found = FIELDS["optimizer"](source)
    found |= _warmup(source, of("lr_warmup_steps"), of("lr_warmup_steps_ratio"))
    if is_megatron(source):
        floor = lowest if source.text(legacy.RELEASE) in (None, "2026-02") else 0.0
        found["clip_grad"] = of("clip_grad").number("clip_grad")
        found |= _of_megatron(old, old.text("lr_decay_style") or style, found["warmup_steps"], floor, lowest)
    else:
        found |= FIELDS["clip"](source)
        found |= _schedule(new, style, lowest)
    return {f"policy.optimizer.{key}": value for key, value in found.items()}


def _critic_optimizer(source: Source, said: Source) -> dict[str, Any]:
    lr, release = said.number("lr") or 0.0, source.text(legacy.RELEASE)
    found = FIELDS["critic_optimizer"](said) | {"lr": lr, **_warmup(source, said, said)}
    if is_megatron(source):
        found["clip_grad"], floor = said.number("clip_grad"), 0.01 * lr if release is None else 0.0
        found |= _of_megatron(said, said.text("lr_decay_style"), found["warmup_steps"], floor, floor)
    else:
        of_critic = source.number(CRITIC + "grad_clip")
        found["clip_grad"] = source.number("trainer.grad_clip") if of_critic is None else of_critic
        # lr_scheduler_type replaced warmup_style in 2026-02, when verl's workers stopped reading the latter.
        style = said.text("lr_scheduler_type" if release in (None, "2026-02") else "warmup_style")
        found |= _schedule(said, style, (said.number("min_lr_ratio") or 0.0) * lr)
    return {f"critic.optimizer.{key}": value for key, value in found.items()}


def _warmup(source: Source, of_steps: Source, of_share: Source) -> dict[str, Any]:
    """Return our keys of verl's warm-up: a number or share of the run's steps, the first with learning rate 0."""
    steps, share = of_steps.whole("lr_warmup_steps"), of_share.number("lr_warmup_steps_ratio")
    return {
        "schedule_per": "step" if period(source) == 1 else "update",
        "warmup_from": 0,
        "warmup_steps": steps if steps is not None and steps >= 0 else share or 0,
    }


def _schedule(said: Source, style: str | None, lowest: float) -> dict[str, Any]:
    if style not in (None, "constant", "cosine"):
        said.lacks("lr_scheduler_type", f"the schedule {style}")
    return {"schedule": "cosine", "min_lr": lowest} if style == "cosine" else {"schedule": "constant"}


def _of_megatron(said: Source, style: str | None, warmup: float, floor: float, lowest: float) -> dict[str, Any]:
    """Return our keys of Megatron's schedule; `floor` and `lowest` are the defaults of lr_warmup_init and min_lr."""
    found: dict[str, Any] = {"betas": [0.9, 0.999], "schedule": style if style in ("linear", "cosine") else "constant"}
    if style not in (None, "constant", "linear", "cosine"):
        said.lacks("lr_decay_style", f"the schedule {style}")
    begin, end = said.number("lr_warmup_init"), said.number("min_lr")
    if warmup:
        found["warmup_init_lr"] = (floor if begin is None else begin) or None
    if found["schedule"] != "constant":
        found |= {"min_lr": lowest if end is None else end, "decay_steps": said.whole("lr_decay_steps")}
    return found


def critic(source: Source) -> dict[str, Any]:
    if not uses_critic(source):
        return {}
    said = source.under(CRITIC)
    found: dict[str, Any] = {
        **FIELDS["critic"](source),
        **_critic_optimizer(source, said.under("optim.")),
        **_own_options(source, CRITIC, "critic"),
        **_offload(source, CRITIC, "critic"),
    }
    legacy.critic_updates(source)
    if (said.whole("ppo_epochs") or 1) != (source.whole(ACTOR + "ppo_epochs") or 1):
        said.lacks("ppo_epochs", "the critic is trained in the policy's updates, so it needs as many passes")
    lengths_of_both = lengths(source)
    longest = lengths_of_both["data.max_prompt_tokens"] + lengths_of_both["data.max_response_tokens"]
    if said.has("use_dynamic_bsz") and not said.flag("use_dynamic_bsz"):
        found["critic.tokens_per_micro_batch"] = (said.whole("ppo_micro_batch_size_per_gpu") or 1) * longest
    elif budget := said.whole("ppo_max_token_len_per_gpu"):
        found["critic.tokens_per_micro_batch"] = max(budget, longest)
    if (warmup := source.whole(VERL + "trainer.critic_warmup") or 0) > 1:
        if (warmup - 1) % period(source):
            source.lacks(VERL + "trainer.critic_warmup", "a warm-up of the critic that does not end at a sync")
        found["critic.warmup_steps"] = periods(source, warmup - 1)
    return found


def gpus(source: Source) -> int:
    """Return the number of the trainer's GPUs: all GPUs of the cluster except those that only sample."""
    total = source.count("cluster.node_num") * source.count("cluster.gpu_per_node")
    if (source.text("mode") or "both") != "both" or offline(source):
        return total
    rest = total - source.count(ROLLOUT + "engine_num") * source.count(ROLLOUT + "tensor_parallel_size")
    for other in source.items("explorer.auxiliary_models"):
        rest -= int(other.get("engine_num", 1)) * int(other.get("tensor_parallel_size", 1)) if isinstance(other, dict) else 0
    if rest < 1:
        raise UnreadableError(f"cluster.node_num x gpu_per_node = {total} leaves no GPU for the trainer next to the engines")
    return rest


def layout(source: Source) -> dict[str, Any]:
    """Return our keys of the policy's layout on the trainer's GPUs, and with Megatron of other models' own layouts."""
    world, name = gpus(source), "ulysses_sequence_parallel_size"
    if not is_megatron(source):
        cp = max(source.whole(f"trainer.{name}") or 1, source.whole(ACTOR + name) or 1)
        return trainers.fsdp(source, world, ACTOR + "fsdp_config.", cp)
    said = source.under(ACTOR + "megatron.")
    policy = shared.world_layout(world, **shared.parallel_sizes(said))
    found = {"policy.backend": str(policy), "policy.sequence_parallel": said.flag("sequence_parallel")}
    found |= shared.virtual_stages(said, "policy")
    others = {"reference": (REFERENCE, uses_reference(source)), "critic": (CRITIC, uses_critic(source))}
    for name, (start, is_there) in others.items():
        if is_there:
            found |= _own_layout(source.under(start + "megatron."), name, policy)
    return found


def _own_layout(said: Source, name: str, policy: ParallelLayout) -> dict[str, Any]:
    """Return our keys of another model's layout; empty if it is the policy's or the ranks do not divide into it."""
    keys = [key for key in said.keys("") if key.endswith("_parallel_size") and key != shared.VIRTUAL]
    if not keys:
        return {}
    sizes = shared.parallel_sizes(said)
    if (own := shared.own_layout(policy, **sizes)) is not None:
        return {f"{name}.backend": own, **shared.virtual_stages(said, name)}
    try:
        shared.world_layout(policy.world_size, **sizes)
    except UnreadableError as error:
        said.lacks(keys[0], f"{error}; the model uses the policy's layout", changes_result=False)
    return {}


def memory(source: Source) -> dict[str, Any]:
    """Return our keys of data type, recomputation, Megatron-Core's options and offload, for policy and reference."""
    section = "megatron." if is_megatron(source) else "fsdp_config."
    found = {**_options(source, ACTOR, "policy"), **_offload(source, ACTOR, "policy")}
    found["policy.dtype"] = dtype(source, f"{ACTOR}{section}dtype")
    if uses_reference(source):
        own = _own_options(source, REFERENCE, "reference")
        found |= {key: value for key, value in own.items() if "recompute" not in key and ".ddp" not in key}
        # The reference's weights leave the GPU with the policy's.
        key = f"{section}param_offload"
        if source.flag(REFERENCE + key) and not source.flag(ACTOR + key):
            source.lacks(REFERENCE + key, shared.REFERENCE_ALONE, changes_result=False)
    return found


def _options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Return our keys of a model's recomputation and Megatron-Core options."""
    if not is_megatron(source):
        key = (CRITIC + "model." if start == CRITIC else MODEL) + "enable_gradient_checkpointing"
        return {f"{ours}.recompute": "full"} if source.flag(key) else {}
    options = start + "megatron.override_transformer_config"
    found = {**shared.recompute(source, options, ours), **shared.megatron_options(source, options, f"{ours}.megatron")}
    if (said := source.under(start + "megatron.")).flag("use_mbridge"):
        missing = {
            "value heads": start == CRITIC,
            "adapters": source.has("model.lora_configs"),
            "virtual stages": bool(shared.virtual_stages(said, ours)),
            "checkpoints of Megatron-Core": said.flag("use_dist_checkpointing"),
        }
        lacks = next((part for part, is_needed in missing.items() if is_needed), None)
        found |= shared.bridge(said, "use_mbridge", "mbridge", ours, lacks)
    return found | shared.ddp_options(source, start + "megatron.override_ddp_config.", ours)


def _own_options(source: Source, start: str, ours: str) -> dict[str, Any]:
    """Return our keys of a model's own options; empty if they are equal to the policy's, which it has by default."""
    own = _options(source, start, ours)
    of_policy = {f"{ours}{key.removeprefix('policy')}": value for key, value in _options(source, ACTOR, "policy").items()}
    if own == of_policy:
        return {}
    found: dict[str, Any] = {f"{ours}.recompute": "none", **own}
    if not any(key.startswith(f"{ours}.megatron.") for key in own) and any(".megatron." in key for key in of_policy):
        # An empty section; without it the model would have the policy's options.
        found[f"{ours}.megatron.transformer"] = {}
    return found


def _offload(source: Source, start: str, ours: str) -> dict[str, Any]:
    section = "megatron." if is_megatron(source) else "model.fsdp_config." if start == CRITIC else "fsdp_config."
    return shared.offload(source, start + section, ours)


def weights(source: Source) -> dict[str, Any]:
    """Return our keys of models whose weights are a Megatron-Core checkpoint instead of the Hugging Face directory."""
    if not is_megatron(source):
        return {}
    directory, has_reference = source.path("model.model_path"), uses_reference(source)
    roles = [
        ("model.path", ACTOR, "model.model_path", True),
        ("reference.path", REFERENCE, "model.model_path", has_reference),
        ("critic.path", CRITIC, "model.critic_model_path", uses_critic(source)),
    ]
    return shared.megatron_weights(source, directory, roles, has_reference)
