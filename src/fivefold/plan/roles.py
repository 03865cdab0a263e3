"""Models of a run as its ranks hold them, and their total memory: configuration -> Sharded. No torch here."""

from __future__ import annotations

from pathlib import Path

from fivefold.config import RunConfig
from fivefold.config.machine import on_gpus
from fivefold.config.roles import Role, Roles
from fivefold.models.families import load_spec
from fivefold.models.spec import ModelSpec
from fivefold.plan.engine_checks import engine_cache
from fivefold.plan.memory import Memory, Other, Sharded, estimate_memory
from fivefold.plan.placement import Placed


def placed(roles: Roles) -> list[Placed]:
    """Return where each model of the run is placed."""
    return [Placed(role.label, role.layout, role.first_rank) for role in roles.models.values()]


def sharded(config: RunConfig, role: Role, spec: ModelSpec) -> Sharded:
    """Return a model as its layout shards it."""
    settings, layout = role.settings, role.layout
    # A step may have fewer tokens than fit in a micro-batch.
    samples = -(-config.samples_per_step // layout.dp)
    most = config.max_sequence_tokens * samples
    return Sharded(
        spec,
        layout,
        settings.megatron.pipeline_split,
        settings.recompute,
        min(settings.tokens_per_micro_batch, most) if role.is_learner else 0,
        on_gpus(config.launch, config.trainer.device),
        settings.lora.spec,
        spec.mtp_layers if settings.mtp.train else 0,
        config.max_sequence_tokens * min(settings.sequences_per_forward or 0, samples),
        settings.fsdp,
    )


def shard_roles(config: RunConfig, spec: ModelSpec) -> dict[str, Sharded]:
    """Return role -> model as its layout shards it, for each model whose sizes are known; `spec` is the policy's."""
    known: dict[str, Sharded] = {}
    for name, role in config.roles.models.items():
        described = config.model.described_by(role.path)
        is_policy_s = role.path == config.model.path and not role.has_value_head
        if not is_policy_s and Path(described).is_dir():
            known[name] = sharded(config, role, load_spec(described, role.has_value_head))
        elif not role.has_value_head:
            # A language model whose files are not here is assumed to be as large as the policy.
            known[name] = sharded(config, role, spec)
    return known


def memory_of(config: RunConfig, spec: ModelSpec) -> Memory:
    """Return the memory of a run's fullest rank; `spec` is the policy's."""
    on_gpu, roles, models = on_gpus(config.launch, config.trainer.device), config.roles.models, shard_roles(config, spec)
    shares = not config.engine.url and not config.engine.is_apart
    return estimate_memory(
        models.pop("policy"),
        dtype=config.policy.dtype,
        engine_sequences=config.engine.max_num_seqs if config.may_generate and shares else 0,
        engine_shards=1 if config.engine.layout is None else config.engine.layout.tp,
        engine_dtype=config.engine.dtype,
        engine_cache=engine_cache(config, spec),
        engine_processes=config.engine.process_count,
        engine_sleeps=config.engine.sleep and on_gpu,
        max_sequence_tokens=config.max_sequence_tokens,
        offload=config.policy.offload.parts if on_gpu else frozenset(),
        others={
            name: Other(
                model,
                roles[name].first_rank,
                roles[name].settings.offload.parts if on_gpu and not roles[name].reads_text else frozenset(),
                roles[name].is_learner,
                roles[name].compared_by,
            )
            for name, model in models.items()
        },
    )
