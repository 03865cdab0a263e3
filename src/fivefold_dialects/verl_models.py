"""Translate verl's layouts, data types, memory, batches, optimizers with their schedules, and checkpoints to our keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fivefold_dialects import shared, trainers, verl_async
from fivefold_dialects.legacy import verl as legacy
from fivefold_dialects.source import Source
from fivefold_dialects.table import load
from fivefold_dialects.verl_algorithm import CHOICES, FIELDS, estimator, kl_in_reward

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_C, _REF = "critic.", "actor_rollout_ref.ref."
SCHEDULES: Mapping[str, Mapping[str, Any]] = load("verl")["schedules"]
TOTAL_STEPS = "trainer.total_training_steps"
CHECKPOINTING = _M + "enable_gradient_checkpointing"
STRATEGIES = ("fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "mindspeed")


def is_megatron(source: Source) -> bool:
    """Return whether the actor trains with Megatron-Core, by its strategy or by the name of its configuration."""
    for key in (_A + "strategy", "model_engine"):
        if source.has(key) and (chosen := source.text(key)) is not None:
            by_fsdp = source.text(_A + "mindspeed.strategy") == "mindspeed_fsdp"
            return chosen == "megatron" or (chosen == "mindspeed" and not by_fsdp)
    named = [source.text("--config-name") or "", *source.texts("defaults")]
    return any("megatron" in name for name in named) or source.text(_A + "strategy") == "megatron"


def engine_of(source: Source) -> str:
    """Return the name in SCHEDULES of the engine that trains."""
    if is_megatron(source):
        return "megatron"
    named = (source.text("model_engine"), source.text(_A + "strategy"))
    return next((name for name in ("veomni", "torchtitan") if name in named), "fsdp")


def mcore(source: Source) -> str:
    """Return the section of the actor's Megatron-Core settings; MindSpeed's engine has its own section (2026-05 to 08)."""
    engines = (source.text("model_engine"), source.text(_A + "strategy"))
    return _A + ("mindspeed." if "mindspeed" in engines else "megatron.")


def options(source: Source) -> str:
    """Return the section of the fields of Megatron-Core's TransformerConfig."""
    if (start := mcore(source)) == _A + "megatron.":
        return start + "override_transformer_config"
    # This section was llm_kwargs until 2026-05.
    return start + ("llm_kwargs" if source.keys(start + "llm_kwargs.") else "mcore_kwargs")


def gpus(source: Source) -> int:
    """Return the number of the trainer's GPUs."""
    if (split := legacy.split_gpus(source)) is not None:
        return split[0]
    return source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node")


def layout(source: Source) -> dict[str, Any]:
    if (name := source.text(_A + "strategy")) not in (None, *STRATEGIES):
        source.lacks(_A + "strategy", f"the engine {name}: known here are {', '.join(STRATEGIES)}")
    if is_megatron(source):
        sizes = shared.parallel_sizes(source.under(mcore(source)))
        return {"policy.backend": str(shared.world_layout(gpus(source), **sizes))}
    section, cp = _A + "fsdp_config.", shared.ulysses(source.under(_A), source.under(_A + "fsdp_config."))
    return trainers.fsdp(source, gpus(source), section, cp=cp, is_built=engine_of(source) == "fsdp")


def megatron(source: Source) -> dict[str, Any]:
    ours: dict[str, Any] = {"policy.sequence_parallel": source.flag(mcore(source) + "sequence_parallel")}
    return ours | virtual_stages(source, "policy") | shared.megatron_options(source, options(source), "policy.megatron")


def virtual_stages(source: Source, ours: str) -> dict[str, Any]:
    """Return our key of the virtual stages of the policy, or of another model `ours` with the same layout."""
    return shared.virtual_stages(source.under(mcore(source)), ours)


def router_replay(source: Source) -> dict[str, Any]:
    """Return our keys of routing replay: R3 needs the engine's key too, and R2 that it is off; verl fails otherwise."""
    mode, by_engine = None, source.flag(_R + "enable_rollout_routing_replay")
    for key in (f"{_A}{part}router_replay.mode" for part in ("megatron.", "veomni.", "")):
        if (value := source.text(key)) in (None, "disabled"):
            continue
        if not is_megatron(source) and "veomni" not in key:
            source.fixed(key, "read by Megatron and VeOmni only")
        elif value not in ("R2", "R3"):
            source.lacks(key, f"the mode {value} of router replay: known here are R2 and R3")
        elif (value == "R3") != by_engine:
            source.lacks(key, f"{value} with rollout.enable_rollout_routing_replay={by_engine}, with which verl fails")
        else:
            mode = mode or value
    return shared.replayed(mode)


def dtypes(source: Source) -> dict[str, Any]:
    """Return our keys of the policy's data type, by default bfloat16, and of the engine's if it differs."""
    trainers = [f"{section}dtype" for section in sections(source, _A)]
    if engine_of(source) == "fsdp":
        trainers.append(_A + "fsdp_config.mixed_precision.param_dtype")
    policy = next(filter(None, [shared.dtype(source, key) for key in trainers]), "bfloat16")
    engine = policy if source.text(_R + "dtype") == "auto" else shared.dtype(source, _R + "dtype") or "bfloat16"
    return {"policy.dtype": None if policy == "bfloat16" else policy, "engine.dtype": None if engine == policy else engine}


def sections(source: Source, role: str) -> list[str]:
    """Return the sections of a model's engine settings, which begin with `role`; an FSDP critic has two possible ones."""
    if is_megatron(source):
        return [mcore(source) if role == _A else role + "megatron."]
    if role == _C and engine_of(source) == "fsdp":
        return [role + "model.fsdp_config.", role + "fsdp."]
    return [role + {"fsdp": "fsdp_config."}.get(engine_of(source), f"{engine_of(source)}.")]


def offloaded(source: Source, role: str) -> list[str]:
    """Return the parts of a model that are offloaded to the host; gradients only with Megatron-Core."""
    return [
        part
        for part, name in shared.PARTS.items()
        if (part != "gradients" or is_megatron(source))
        and True in [source.flag(f"{section}{name}_offload") for section in sections(source, role)]
    ]


def memory(source: Source) -> dict[str, Any]:
    """Return our keys of the policy's recomputation and offload."""
    ours: dict[str, Any] = {f"policy.offload.{part}": True for part in offloaded(source, _A)}
    if not is_megatron(source):
        return ours | ({"policy.recompute": "full"} if source.flag(CHECKPOINTING) else {})
    optim = source.under(_A + "optim.")
    ours |= shared.recompute(source, options(source), "policy")
    ours |= shared.moments(optim, are_read=optim.flag("use_precision_aware_optimizer"))
    return ours | shared.options_of("optimizer", optim.under("override_optimizer_config."), "policy")


def longest(source: Source) -> int:
    return source.count("data.max_prompt_length") + shared.response_tokens(source)


def micro_batch(source: Source) -> dict[str, Any]:
    """Return our key of a micro-batch's tokens: a budget times the ranks of a sequence, or sequences times the longest."""
    tokens = longest(source)
    if source.flag(_A + "use_dynamic_bsz"):
        by_mcore = is_megatron(source)
        shared_by = mcore(source) + "context_parallel_size" if by_mcore else _A + "ulysses_sequence_parallel_size"
        budget = source.count(_A + "ppo_max_token_len_per_gpu") * (source.whole(shared_by) or 1)
        return {"policy.tokens_per_micro_batch": max(budget, tokens)}
    sequences = source.whole(_A + "ppo_micro_batch_size_per_gpu")
    if sequences is None and (total := source.whole(_A + "ppo_micro_batch_size")) is not None:
        sequences = max(1, total // gpus(source))
    return {"policy.tokens_per_micro_batch": (sequences or 1) * tokens}


def schedule(optim: Source, engine: str, steps_of_run: int | None = None) -> dict[str, Any]:
    """Return our keys of an optimizer's schedule, from a section `optim`; `steps_of_run` is trainer.total_training_steps if
    set: verl's schedule covers these steps even if the data end earlier."""
    reads, rate = SCHEDULES[engine], optim.number("lr") or 0.0
    key = "warmup_style" if reads["style"] == "lr_scheduler_type" and optim.text("warmup_style") else reads["style"]
    style = optim.one_of(key, ("constant", "linear", "cosine"), "schedule", reads["usual"])
    factor = 1.0 if reads.get("is_rate") else rate
    ours: dict[str, Any] = {"schedule": style}
    if "first" in reads:
        ours["warmup_init_lr"] = factor * (optim.number(reads["first"]) or 0.0) or None
    total = steps_of_run if steps_of_run and steps_of_run > 0 else None
    steps = (optim.whole(reads["decay_steps"]) if "decay_steps" in reads else None) or total
    if style != "constant":
        ours["min_lr"] = factor * (optim.number(reads["lowest"]) or 0.0) if "lowest" in reads else 0.0
        ours["decay_steps"] = steps
    ours["warmup_steps"] = _warmup(optim, reads, steps)
    ours["warmup_from"] = reads.get("warmup_from", 0) if ours["warmup_steps"] else 0
    return ours


def _warmup(optim: Source, reads: Mapping[str, Any], decay_steps: int | None) -> float:
    """Return the warm-up in steps, or as a share (below 1) of the run if `decay_steps` is not known."""
    steps = None if reads.get("shares_only") else optim.whole("lr_warmup_steps")
    if steps is not None and steps >= 0 and (steps or "decay_steps" not in reads):
        return steps
    shares = ("lr_warmup_steps_ratio", *reads.get("shares", ()))
    share = optim.number(next((key for key in shares if optim.has(key)), shares[0])) or 0.0
    return int(share * decay_steps) if decay_steps and share < 1 else share


def low_rank(
    source: Source, start: str = _M, ours: str = "policy", by_megatron: Callable[[Source], bool] = is_megatron
) -> dict[str, Any]:
    """Return our keys of a model's adapters, in section `start`: FSDP reads lora_rank and others, Megatron-Core lora.*."""
    return shared.adapters(source.under(start), ours, "verl", "adapters_of_megatron" if by_megatron(source) else "adapters")


def batch(source: Source) -> dict[str, Any]:
    if verl_async.is_fully_async(source):
        return verl_async.batch(source)
    ours = shared.updates(source, legacy.batch_key(source, verl_async.is_v1(source)), _A + "ppo_mini_batch_size")
    return verl_async.separate_batch(source, ours) if verl_async.is_separate(source) else ours


def optimizer(source: Source, role: str = _A, ours: str = "policy.optimizer") -> dict[str, Any]:
    optim = source.under(role + "optim.")
    uses_megatron = is_megatron(source)
    values = FIELDS["optimizer"](optim)
    if not uses_megatron:
        # verl does not pass betas to Megatron's optimizer, whose defaults are 0.9 and 0.999.
        values["betas"] = optim.numbers("betas")
        values["eps"] = optim.number("eps")
        # The newer engine reads optim.clip_grad, the older workers grad_clip: take the one that is set.
        set_there = optim.has("clip_grad") and not source.has(role + "grad_clip")
        values["clip_grad"] = optim.number("clip_grad") if set_there else source.number(role + "grad_clip")
    else:
        values |= {"betas": [0.9, 0.999], "clip_grad": optim.number("clip_grad")}
    values |= schedule(optim, engine_of(source), source.whole(TOTAL_STEPS))
    if verl_async.is_fully_async(source) or verl_async.is_separate(source):
        values |= verl_async.schedule(source, values["schedule"], values["warmup_steps"])
    return {f"{ours}.{key}": value for key, value in values.items()}


def megatron_checkpoints(source: Source) -> dict[str, Any]:
    """Return our keys of models whose weights are a Megatron-Core checkpoint instead of the Hugging Face directory."""
    directory, has_reference = source.path(_M + "path"), uses_reference(source)
    roles = [
        ("model.path", _A, _M + "path", True),
        ("reference.path", _REF, _M + "path", has_reference),
        ("critic.path", _C, _C + "model.path", uses_critic(source)),
        ("reward.model.path", "reward_model.", "reward_model.model.path", source.flag("reward_model.enable")),
    ]
    return shared.megatron_weights(source, directory, roles, has_reference)


def uses_critic(source: Source) -> bool:
    return estimator(source) == "gae"


def critic(source: Source) -> dict[str, Any]:
    if not uses_critic(source):
        return shared.without_critic(source, "trainer.critic_warmup", 1)
    section = source.under(_C)
    ours = FIELDS["critic"](section) | optimizer(source, _C, "critic.optimizer") | low_rank(source, _C + "model.", "critic")
    ours["algorithm.value_aggregate"] = CHOICES[_C + "loss_agg_mode"].read(source)
    for key in ("ppo_mini_batch_size", "ppo_epochs"):
        if section.raw(key) is not None and str(section.raw(key)) != str(source.raw(_A + key)):
            section.lacks(key, "the critic is trained in the policy's updates: set it as the policy's")
    if (warmup := source.whole("trainer.critic_warmup") or 0) > 1:
        ours["critic.warmup_steps"] = warmup - 1
    if section.flag("use_dynamic_bsz") and (budget := section.whole("ppo_max_token_len_per_gpu")):
        ours["critic.tokens_per_micro_batch"] = max(budget, longest(source))
    elif sequences := section.whole("ppo_micro_batch_size_per_gpu"):
        ours["critic.tokens_per_micro_batch"] = sequences * longest(source)
    if not is_megatron(source):
        ours["critic.recompute"] = "full" if section.flag("model.enable_gradient_checkpointing") else "none"
    return ours | {f"critic.offload.{part}": True for part in offloaded(source, _C)} | _own_options(source, _C, "critic")


def reference(source: Source) -> dict[str, Any]:
    """Return our keys of the reference's own Megatron-Core options; its weights leave the GPU with the policy's."""
    if "parameters" in offloaded(source, _REF) and "parameters" not in offloaded(source, _A):
        key = f"{sections(source, _REF)[0]}param_offload"
        source.lacks(key, shared.TEXTS["reference_alone"], changes_result=False)
    options = _own_options(source, _REF, "reference")
    return {key: value for key, value in options.items() if "recompute" not in key}


def uses_reference(source: Source) -> bool:
    return source.flag(_A + "use_kl_loss") or kl_in_reward(source)


def _own_options(source: Source, role: str, ours: str) -> dict[str, Any]:
    """Return our keys of a model's own Megatron-Core options; empty if it has none and uses the policy's."""
    policy = dtypes(source)["policy.dtype"] or "bfloat16"
    for key in (f"{section}dtype" for section in sections(source, role)):
        if source.has(key) and (name := source.text(key)) is not None and shared.DTYPES.get(name) != policy:
            source.lacks(key, f"the data type {name}, where the policy has {policy}")
    start = f"{role}megatron.override_transformer_config"
    if not is_megatron(source) or not source.keys(f"{start}."):
        return {}
    values = shared.megatron_options(source, start, f"{ours}.megatron")
    return values | shared.recompute(source, start, ours) | (virtual_stages(source, ours) if values else {})
