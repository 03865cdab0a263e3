"""The models of a run, what each is on its layout, and their memory together: configuration -> Sharded.

No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.config.learners import PolicyConfig
from fivefold.models.families import load_spec
from fivefold.models.spec import ModelSpec
from fivefold.plan.devices import on_gpus
from fivefold.plan.engine_checks import engine_cache
from fivefold.plan.memory import Memory, Sharded, estimate_memory
from fivefold.plan.placement import Placed


@dataclass(frozen=True)
class Role:
    """One of the models that a run shards over its ranks."""

    where: str
    """Its section of the configuration."""
    key: str
    path: str
    settings: PolicyConfig
    value_head: bool = False
    """It ends in a value head."""
    trains: bool = False
    """It learns; a reference and a reward model only compute."""

    @property
    def section(self) -> str:
        """Whose settings it has: what a process reward model is compared with has none of its own."""
        return "prm" if self.where == "prm.reference" else self.where

    def sharded(self, config: RunConfig, spec: ModelSpec) -> Sharded:
        """As its layout shards it."""
        settings, layout = self.settings, self.settings.layout
        # A step may have less than a micro-batch would hold.
        most = config.max_sequence_tokens * -(-config.samples_per_step // layout.dp)
        return Sharded(
            spec,
            layout,
            settings.megatron.pipeline_split,
            settings.recompute,
            min(settings.tokens_per_micro_batch, most) if self.trains else 0,
            on_gpus(config),
            settings.lora.spec,
            spec.mtp_layers if settings.mtp.train else 0,
        )


def roles(config: RunConfig) -> list[Role]:
    """Policy, reference, critic, process reward model and reward model, as far as the run has them."""
    policy, reward_model = config.policy, config.reward.model
    parts = [Role("policy", "model.path", config.model.path, policy, trains=True)]
    if config.algorithm.needs_reference and not config.reference_is_base:
        path = config.reference.path or config.model.path
        parts.append(Role("reference", "reference.path", path, config.reference.settings(policy)))
    if config.uses_critic:
        path = config.critic.path or config.model.path
        parts.append(Role("critic", "critic.path", path, config.critic.settings(policy), value_head=True, trains=True))
    if config.uses_prm:
        path = config.prm.path or config.model.path
        parts.append(Role("prm", "prm.path", path, config.prm.settings(policy), trains=True))
    if config.has_prm_reference and not config.prm_reference_is_base:
        frozen = config.prm.reference
        parts.append(Role("prm.reference", "prm.reference_path", frozen.path or config.model.path, frozen.settings(policy)))
    if reward_model.path:
        parts.append(
            Role("reward.model", "reward.model.path", reward_model.path, reward_model.settings(policy), value_head=True)
        )
    return parts


def placed(config: RunConfig) -> list[Placed]:
    """Where each model lies that the run has."""
    spans = config.spans
    return [
        Placed(part.where.replace(".", " "), part.settings.layout, spans[part.where].start)
        for part in roles(config)
        if part.where in spans
    ]


def shard_roles(config: RunConfig, spec: ModelSpec) -> dict[str, Sharded]:
    """Each model that is here, by its section, as its layout shards it."""
    parts = {part.where: part for part in roles(config)}
    # A reference that is not here is taken to be as large as the policy.
    here: dict[str, ModelSpec] = {name: spec for name, part in parts.items() if not part.value_head}
    for name, part in parts.items():
        if part.path != config.model.path or part.value_head:
            own = config.described_by(part.path)
            here |= {name: load_spec(own, part.value_head)} if Path(own).is_dir() else {}
    return {name: parts[name].sharded(config, own) for name, own in here.items()}


def memory_of(config: RunConfig, spec: ModelSpec) -> Memory:
    """Memory of the fullest rank of a run with a policy of this spec."""
    on_gpu = on_gpus(config)
    parts = {part.where: part for part in roles(config)}
    sharded = shard_roles(config, spec)
    shares = not config.engine.url and not config.engine.is_apart
    return estimate_memory(
        sharded["policy"],
        dtype=config.policy.dtype,
        engine_sequences=config.engine.max_num_seqs if config.may_generate and shares else 0,
        engine_shards=1 if config.engine.layout is None else config.engine.layout.tp,
        engine_dtype=config.engine.dtype,
        engine_cache=engine_cache(config, spec),
        engine_sleeps=config.engine.sleep and on_gpu,
        max_sequence_tokens=config.max_sequence_tokens,
        offload=config.policy.offload.parts if on_gpu else frozenset(),
        reference=sharded.get("reference"),
        learners={name: one for name, one in sharded.items() if parts[name].trains and name != "policy"},
        prm_reference=sharded.get("prm.reference"),
        offloads={name: part.settings.offload.parts for name, part in parts.items() if on_gpu},
        reward_model=sharded.get("reward.model"),
        first_ranks={name.replace(".", "_"): span.start for name, span in config.spans.items()},
    )
