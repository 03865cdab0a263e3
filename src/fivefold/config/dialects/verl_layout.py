"""How verl spreads its policy over GPUs: layout, numbers' types, recomputation and offload, micro-batches."""

from __future__ import annotations

from typing import Any

from fivefold.config.dialects import shared, verl_async
from fivefold.config.dialects.source import Source

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_C = "critic."
STRATEGIES = ("fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "mindspeed")


def is_megatron(source: Source) -> bool:
    """The actor trains with Megatron-Core: by its strategy, or by the configuration that it starts from."""
    for key in (_A + "strategy", "model_engine"):
        if source.has(key) and (chosen := source.text(key)) is not None:
            by_fsdp = source.text(_A + "mindspeed.strategy") == "mindspeed_fsdp"
            return chosen == "megatron" or (chosen == "mindspeed" and not by_fsdp)
    named = [source.text("--config-name") or "", *source.texts("defaults")]
    return any("megatron" in name for name in named) or source.text(_A + "strategy") == "megatron"


def engine_of(source: Source) -> str:
    """What trains, by its name in verl_schedule.py."""
    if is_megatron(source):
        return "megatron"
    named = (source.text("model_engine"), source.text(_A + "strategy"))
    return next((name for name in ("veomni", "torchtitan") if name in named), "fsdp")


def mcore(source: Source) -> str:
    """Where Megatron-Core's settings of the actor stand: MindSpeed's engine has its own section (2026-05 to 08)."""
    said = (source.text("model_engine"), source.text(_A + "strategy"))
    return _A + ("mindspeed." if "mindspeed" in said else "megatron.")


def options(source: Source) -> str:
    """Where fields of Megatron-Core's TransformerConfig stand."""
    start = mcore(source)
    if start == _A + "megatron.":
        return start + "override_transformer_config"
    # llm_kwargs until 2026-05.
    return start + ("llm_kwargs" if source.keys(start + "llm_kwargs.") else "mcore_kwargs")


def gpus(source: Source) -> int:
    """Of the trainer."""
    of_node = "n_training_gpus_per_node" if verl_async.is_rllm(source) else "n_gpus_per_node"
    return source.count("trainer.nnodes") * source.count(f"trainer.{of_node}")


def layout(source: Source) -> dict[str, Any]:
    if (name := source.text(_A + "strategy")) not in (None, *STRATEGIES):
        source.lacks(_A + "strategy", f"the engine {name}: known here are {', '.join(STRATEGIES)}")
    if not is_megatron(source):
        cp = source.whole(_A + "ulysses_sequence_parallel_size") or 1
        if source.has(_A + "fsdp_config.ulysses_sequence_parallel_size"):
            cp = max(cp, source.whole(_A + "fsdp_config.ulysses_sequence_parallel_size") or 1)
        return {"policy.backend": str(shared.world_layout(gpus(source), cp=cp))}
    sizes = shared.parallel_sizes(source.under(mcore(source)))
    return {"policy.backend": str(shared.world_layout(gpus(source), **sizes))}


def megatron(source: Source) -> dict[str, Any]:
    if not is_megatron(source):
        return {}
    section = source.under(mcore(source))
    found: dict[str, Any] = {"policy.sequence_parallel": section.flag("sequence_parallel")}
    return found | virtual_stages(source, "policy") | shared.megatron_options(source, options(source), "policy.megatron")


def virtual_stages(source: Source, ours: str) -> dict[str, Any]:
    """Of the policy, and of each model that lies as it does."""
    count = source.whole(mcore(source) + "virtual_pipeline_model_parallel_size") or 1
    return {f"{ours}.megatron.pipeline.virtual_pipeline_model_parallel_size": count} if count > 1 else {}


def router_replay(source: Source) -> dict[str, Any]:
    """R3 where both trainer and engine are asked for it; verl fails where it is one of them, or R2 beside the engine."""
    mode, by_engine = None, source.flag(_R + "enable_rollout_routing_replay")
    for key in (f"{_A}{part}router_replay.mode" for part in ("megatron.", "veomni.", "")):
        said = source.text(key)
        if said in (None, "disabled"):
            continue
        if not is_megatron(source) and "veomni" not in key:
            source.fixed(key, "read by Megatron and VeOmni only")
        elif said not in ("R2", "R3"):
            source.lacks(key, f"the mode {said} of router replay: known here are R2 and R3")
        elif (said == "R3") != by_engine:
            source.lacks(key, f"{said} with rollout.enable_rollout_routing_replay: {by_engine}, with which verl fails")
        elif mode is None:
            mode = said
    return shared.replayed(mode)


def dtypes(source: Source) -> dict[str, Any]:
    """Of the policy, and of the engine where it is another; bfloat16 where nothing is said."""
    trainers = [f"{section}dtype" for section in sections(source, _A)]
    if engine_of(source) == "fsdp":
        trainers.append(_A + "fsdp_config.mixed_precision.param_dtype")
    found = {_R + "dtype": "bfloat16"}
    for key in (*trainers, _R + "dtype"):
        if source.has(key) and (name := source.text(key)) not in (None, "auto"):
            if name not in shared.DTYPES:
                source.lacks(key, f"numbers of the type {name}: known here are {', '.join(shared.DTYPES)}")
            found[key] = shared.DTYPES.get(str(name), "bfloat16")
    engine = found.pop(_R + "dtype")
    policy = next(iter(found.values()), "bfloat16")
    if source.text(_R + "dtype") == "auto":
        engine = policy
    return {"policy.dtype": None if policy == "bfloat16" else policy, "engine.dtype": None if engine == policy else engine}


def sections(source: Source, role: str) -> list[str]:
    """Where the engine's settings of a model stand, whose own begin with `role`; the newer engine's critic has a second."""
    if is_megatron(source):
        return [mcore(source) if role == _A else role + "megatron."]
    if role == _C and engine_of(source) == "fsdp":
        return [role + "model.fsdp_config.", role + "fsdp."]
    return [role + {"fsdp": "fsdp_config."}.get(engine_of(source), f"{engine_of(source)}.")]


_PARTS = {"parameters": "param", "gradients": "grad", "optimizer": "optimizer"}
"""What is offloaded -> its name there."""


def offloaded(source: Source, role: str) -> list[str]:
    """Parts of a model that wait on the host; gradients do with Megatron-Core only."""
    parts = {part: name for part, name in _PARTS.items() if part != "gradients" or is_megatron(source)}
    flags = {
        part: [source.flag(f"{section}{name}_offload") for section in sections(source, role)] for part, name in parts.items()
    }
    return [part for part, said in flags.items() if any(said)]


def memory(source: Source) -> dict[str, Any]:
    """Recomputation and offload."""
    found: dict[str, Any] = {f"policy.offload.{part}": True for part in offloaded(source, _A)}
    if is_megatron(source):
        found |= shared.recompute(source, options(source), "policy")
        said = source.under(_A + "optim.")
        found |= shared.moments(said, are_read=said.flag("use_precision_aware_optimizer"))
        optimizer = said.under("override_optimizer_config.")
        for key in optimizer.keys(""):
            if optimizer.value(key) is None:
                continue
            if key not in (
                "optimizer_cpu_offload",
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
                "use_precision_aware_optimizer",
            ):
                optimizer.lacks(key, "another setting of Megatron's optimizer: policy.megatron.optimizer has its fields")
            else:
                value = optimizer.value(key)
                if value not in (False, None) and optimizer.flag("optimizer_cpu_offload") | (key.startswith("use_")):
                    found[f"policy.megatron.optimizer.{key}"] = float(value) if key.endswith("fraction") else value
        return found
    return found | ({"policy.recompute": "full"} if source.flag(_M + "enable_gradient_checkpointing") else {})


def longest(source: Source) -> int:
    return source.count("data.max_prompt_length") + source.count("data.max_response_length")


def micro_batch(source: Source) -> dict[str, Any]:
    """A token budget as it is, times the ranks that share a sequence; a number of sequences at their longest."""
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
