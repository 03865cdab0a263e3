"""The models of a run in one table, for all code that lists models. Sections -> Roles. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter

from fivefold.config.learners import FrozenConfig, LearnerConfig, OffloadConfig, PolicyConfig, RewardModelConfig
from fivefold.config.schema import CriticConfig, PRMConfig, ReferenceConfig, Sections
from fivefold.layout import ParallelLayout


class Head(Enum):
    """Output of a model for each token."""

    LANGUAGE_MODEL = "the log-prob of the token"
    VALUE = "the value of the text up to and including the token"


class Learns(Enum):
    """When a model takes its optimizer steps."""

    NEVER = "never"
    BEFORE_ADVANTAGES = "before advantages are computed, which need it"
    WITH_POLICY = "when the policy does"


@dataclass(frozen=True)
class Role:
    """One model of a run."""

    name: str
    """Name of its configuration section, its part of a checkpoint and its metrics."""
    path: str
    """Directory or hub id of its initial weights."""
    path_key: str
    """Key that names these weights."""
    section: PolicyConfig | FrozenConfig
    """The model's own section, as written."""
    policy: PolicyConfig
    """Settings of the policy, which apply where the section leaves them out."""
    backend_key: str
    """Key of its layout."""
    first_rank: int = 0
    head: Head = Head.LANGUAGE_MODEL
    learns: Learns = Learns.NEVER
    updates_per_step: int = 0
    """Number of optimizer steps per rollout."""
    epochs: int = 1
    """Number of passes that these steps make over the rollout."""
    compared_by: str | None = None
    """The role that learns by comparison with this model."""
    reads_text: bool = False
    """Whether the model scores texts, with its own tokenizer, before they are packed; if so, it stays on the device."""
    served_by: str | None = None
    """The role whose model serves as this one, so there is no second model."""
    without_adapters: bool = False
    """Whether that model serves with its adapters switched off."""

    @cached_property
    def settings(self) -> PolicyConfig:
        """All settings of the model; raises ValueError if its layout cannot be parsed."""
        if isinstance(self.section, PolicyConfig):
            return self.section
        settings = self.section.settings(self.policy)
        if self.has_value_head and self.section.megatron is None:
            # Other libraries have no value heads.
            return replace(settings, megatron=replace(settings.megatron, bridge_type="native"))
        return settings

    @property
    def section_key(self) -> str:
        """Key of the section with its settings; for a comparison model, the section of the model compared with it."""
        return self.backend_key.removesuffix(".backend")

    def key_of(self, name: str) -> str:
        """Return the full key of a setting: that of the model's own section, or the policy's where the section has none."""
        is_own = isinstance(self.section, PolicyConfig) or getattr(self.section, name.partition(".")[0], None) is not None
        return f"{self.section_key if is_own else 'policy'}.{name}"

    @property
    def label(self) -> str:
        """Name of the model in messages."""
        return self.name.replace(".", " ")

    @property
    def pass_name(self) -> str | None:
        """Name of the result of its pass over a rollout; None if that pass belongs to its updates."""
        if self.learns is Learns.BEFORE_ADVANTAGES:
            return None
        return self.label if self.reads_text else "values" if self.has_value_head else "log-probs"

    @property
    def is_learner(self) -> bool:
        return self.learns is not Learns.NEVER

    @property
    def has_value_head(self) -> bool:
        return self.head is Head.VALUE

    @property
    def layout(self) -> ParallelLayout:
        return self.settings.layout

    @property
    def has_own_layout(self) -> bool:
        """Whether the role's section names a layout; otherwise the model has the policy's."""
        return isinstance(self.section, FrozenConfig) and self.section.backend is not None

    @property
    def ranks(self) -> range:
        """Ranks that hold the model."""
        return range(self.first_rank, self.first_rank + self.layout.world_size)


@dataclass(frozen=True)
class Roles(Mapping[str, Role]):
    """The roles of a run by name, the policy first."""

    by_name: Mapping[str, Role]

    def __getitem__(self, name: str) -> Role:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @cached_property
    def models(self) -> dict[str, Role]:
        """Roles with a model of their own."""
        return {name: role for name, role in self.items() if role.served_by is None}

    @cached_property
    def learners(self) -> dict[str, Role]:
        """Roles whose model is trained."""
        return {name: role for name, role in self.items() if role.is_learner}

    @property
    def further_learners(self) -> dict[str, Role]:
        """Roles, except the policy, whose model is trained."""
        return {name: role for name, role in self.learners.items() if name != "policy"}

    @property
    def world_size(self) -> int:
        """Number of ranks of all models."""
        return max(role.ranks.stop for role in self.models.values())

    @property
    def own_layouts(self) -> dict[str, ParallelLayout]:
        """Layouts of models that do not have the policy's."""
        return {name: role.layout for name, role in self.models.items() if role.has_own_layout}

    def settings(self, name: str) -> PolicyConfig:
        """Return a model's settings on its ranks: a model alone on its ranks stays on the device, so it offloads nothing."""
        role = self[name]
        is_alone = [other.ranks for other in self.models.values()].count(role.ranks) == 1
        return replace(role.settings, offload=OffloadConfig()) if is_alone and name != "policy" else role.settings


def roles_of(config: Sections) -> Roles:
    """Return the roles in the run of a configuration; raises ValueError if a layout cannot be parsed."""
    rows = {name: row.make(config) for name, row in ROLES.items()}
    return Roles({name: role for name, role in rows.items() if role is not None})


def _policy(config: Sections) -> Role:
    return Role(
        "policy",
        config.model.path,
        "model.path",
        config.policy,
        config.policy,
        "policy.backend",
        learns=Learns.WITH_POLICY,
        updates_per_step=config.algorithm.updates,
        epochs=config.algorithm.ppo_epochs,
    )


def _reference(config: Sections) -> Role | None:
    if not config.algorithm.needs_reference:
        return None
    role = _further(config, "reference", config.reference)
    policy = config.policy
    is_placed_alike = role.settings.backend == policy.backend or role.layout.is_same(policy.layout)
    is_same = role.path == config.model.path and not role.first_rank and role.settings.megatron == policy.megatron
    return _without_adapters(role, "policy") if policy.lora.rank and is_same and is_placed_alike else role


def _critic(config: Sections) -> Role | None:
    if config.algorithm.resolved.credit != "gae":
        return None
    role = _further(config, "critic", config.critic)
    updates, epochs = config.algorithm.updates, config.algorithm.ppo_epochs
    return replace(role, head=Head.VALUE, learns=Learns.WITH_POLICY, updates_per_step=updates, epochs=epochs)


def _prm(config: Sections) -> Role | None:
    if not config.algorithm.resolved.process_reward.coef:
        return None
    role = _further(config, "prm", config.prm)
    return replace(role, learns=Learns.BEFORE_ADVANTAGES, updates_per_step=config.prm.updates_per_step)


def _prm_reference(config: Sections) -> Role | None:
    """Return the role that the process reward model is compared with: frozen weights on its layout, or the policy."""
    process = config.algorithm.resolved.process_reward
    if not process.coef:
        return None
    role = _further(config, "prm.reference", config.prm.reference)
    role = replace(role, path_key="prm.reference_path", backend_key="prm.backend", compared_by="prm")
    if process.reference == "policy":
        return replace(role, path=config.model.path, served_by="policy")
    is_same = config.prm.reference_path in (None, config.prm.path)
    return _without_adapters(role, "prm") if config.prm.lora.rank and is_same else role


def _reward_model(config: Sections) -> Role | None:
    if not config.reward.model.path or not config.may_generate:
        return None
    return replace(_further(config, "reward.model", config.reward.model), head=Head.VALUE, reads_text=True)


def _further(config: Sections, name: str, section: FrozenConfig) -> Role:
    """Make the role of a model other than the policy; it starts from the policy's weights if its section names none."""
    path = section.path or config.model.path
    return Role(name, path, f"{name}.path", section, config.policy, f"{name}.backend", section.first_rank)


def _without_adapters(role: Role, model: str) -> Role:
    return replace(role, served_by=model, without_adapters=True)


@dataclass(frozen=True)
class Row:
    """One kind of model that a run may have."""

    make: Callable[[Sections], Role | None]
    """Returns the role in the run of a configuration, or None if the run has no such model."""
    section: type[PolicyConfig | FrozenConfig] | None
    """Class of its section; None if the model is configured in another model's section."""
    title: str = ""
    """What the model is called in messages and in the report."""
    switch: str = ""
    """Key, or key and value, that gives a run such a model; empty if a section without the model has its own message."""

    @property
    def learns(self) -> bool:
        return self.section is not None and issubclass(self.section, PolicyConfig | LearnerConfig)


ROLES = {
    "policy": Row(_policy, PolicyConfig, "policy"),
    "reference": Row(_reference, ReferenceConfig, "reference"),
    "critic": Row(_critic, CriticConfig, "critic", "algorithm.credit: gae"),
    "prm": Row(_prm, PRMConfig, "process reward model", "algorithm.process_reward.coef"),
    "prm.reference": Row(_prm_reference, None),
    "reward.model": Row(_reward_model, RewardModelConfig, "reward model"),
}
"""Name of a model -> its row."""
LEARNERS = tuple(name for name, row in ROLES.items() if row.learns)
"""Sections of trained models, the policy first, in the order of a checkpoint's parts."""


def further_sections(config: Sections) -> dict[str, FrozenConfig]:
    """Return every section of a model other than the policy, whether or not the run has that model."""
    return {name: attrgetter(name)(config) for name, row in ROLES.items() if row.section and name != "policy"}
