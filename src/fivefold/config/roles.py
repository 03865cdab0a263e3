"""The models of a run: one table, read by everything that lists models. RunConfig -> Roles. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fivefold.config.learners import FrozenConfig, OffloadConfig, PolicyConfig
from fivefold.layout import ParallelLayout

if TYPE_CHECKING:
    from fivefold.config.schema import RunConfig


class Head(Enum):
    """What a model computes for a token."""

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
    """Its section of the configuration; names its part of a checkpoint and its metrics too."""
    path: str
    """Directory or hub id of the weights that it starts from."""
    path_key: str
    """The key that names them."""
    section: PolicyConfig | FrozenConfig
    """Its own section, as it was written."""
    policy: PolicyConfig
    """The policy's settings, which count where its section leaves them out."""
    backend_key: str
    """The key of its layout."""
    first_rank: int = 0
    head: Head = Head.LANGUAGE_MODEL
    learns: Learns = Learns.NEVER
    updates_per_step: int = 0
    """Optimizer steps for each rollout."""
    epochs: int = 1
    """How often these go through the rollout."""
    compared_by: str | None = None
    """The role that learns by being compared with it."""
    reads_text: bool = False
    """It scores texts, by a tokenizer of its own, before they are packed; it stays on the device."""
    served_by: str | None = None
    """The role whose model serves as this one: there is no second model."""
    without_adapters: bool = False
    """That model serves with its adapters switched off."""

    @cached_property
    def settings(self) -> PolicyConfig:
        """Its whole settings; raises ValueError where its layout cannot be read."""
        return self.section if isinstance(self.section, PolicyConfig) else self.section.settings(self.policy)

    @property
    def section_key(self) -> str:
        """The key of the section with its settings: of what a model is compared with, that of the model."""
        return self.backend_key.removesuffix(".backend")

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name.replace(".", " ")

    @property
    def pass_name(self) -> str | None:
        """What its pass over a rollout gives; None where that belongs to its updates."""
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
        """Its section names a layout; otherwise it takes the policy's."""
        return isinstance(self.section, FrozenConfig) and self.section.backend is not None

    @property
    def ranks(self) -> range:
        """The ranks that hold it."""
        return range(self.first_rank, self.first_rank + self.layout.world_size)


@dataclass(frozen=True)
class Roles(Mapping[str, Role]):
    """The roles of a run by their names, the policy first."""

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
        """Roles besides the policy whose model is trained."""
        return {name: role for name, role in self.learners.items() if name != "policy"}

    @property
    def world_size(self) -> int:
        """Ranks of all models."""
        return max(role.ranks.stop for role in self.models.values())

    @property
    def own_layouts(self) -> dict[str, ParallelLayout]:
        """Layouts of models that do not take the policy's."""
        return {name: role.layout for name, role in self.models.items() if role.has_own_layout}

    def settings(self, name: str) -> PolicyConfig:
        """Settings of a model where it runs: one that is alone on its ranks keeps the device, so it offloads nothing."""
        role = self[name]
        is_alone = [other.ranks for other in self.models.values()].count(role.ranks) == 1
        return replace(role.settings, offload=OffloadConfig()) if is_alone and name != "policy" else role.settings


def roles_of(config: RunConfig) -> Roles:
    """The roles that the run of a configuration has; raises ValueError where a layout cannot be read."""
    rows = {name: make(config) for name, make in ROLES.items()}
    return Roles({name: role for name, role in rows.items() if role is not None})


# --- the table --------------------------------------------------------------------------------------------------------


def _policy(config: RunConfig) -> Role:
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


def _reference(config: RunConfig) -> Role | None:
    if not config.algorithm.needs_reference:
        return None
    role = _further(config, "reference", config.reference)
    policy = config.policy
    is_placed_alike = role.settings.backend == policy.backend or role.layout.is_same(policy.layout)
    is_same = role.path == config.model.path and not role.first_rank and role.settings.megatron == policy.megatron
    return _without_adapters(role, "policy") if policy.lora.rank and is_same and is_placed_alike else role


def _critic(config: RunConfig) -> Role | None:
    if config.algorithm.resolved.credit != "gae":
        return None
    role = _further(config, "critic", config.critic)
    updates, epochs = config.algorithm.updates, config.algorithm.ppo_epochs
    return replace(role, head=Head.VALUE, learns=Learns.WITH_POLICY, updates_per_step=updates, epochs=epochs)


def _prm(config: RunConfig) -> Role | None:
    if not config.algorithm.resolved.process_reward.coef:
        return None
    role = _further(config, "prm", config.prm)
    return replace(role, learns=Learns.BEFORE_ADVANTAGES, updates_per_step=config.prm.updates_per_step)


def _prm_reference(config: RunConfig) -> Role | None:
    """What the process reward model is compared with: weights that stay as they are, on its layout, or the policy."""
    process = config.algorithm.resolved.process_reward
    if not process.coef:
        return None
    role = _further(config, "prm.reference", config.prm.reference)
    role = replace(role, path_key="prm.reference_path", backend_key="prm.backend", compared_by="prm")
    if process.reference == "policy":
        return replace(role, path=config.model.path, served_by="policy")
    is_same = config.prm.reference_path in (None, config.prm.path)
    return _without_adapters(role, "prm") if config.prm.lora.rank and is_same else role


def _reward_model(config: RunConfig) -> Role | None:
    if not config.reward.model.path or not config.may_generate:
        return None
    return replace(_further(config, "reward.model", config.reward.model), head=Head.VALUE, reads_text=True)


def _further(config: RunConfig, name: str, section: FrozenConfig) -> Role:
    """A model besides the policy, which starts from the policy's weights where its section names none."""
    path = section.path or config.model.path
    return Role(name, path, f"{name}.path", section, config.policy, f"{name}.backend", section.first_rank)


def _without_adapters(role: Role, model: str) -> Role:
    return replace(role, served_by=model, without_adapters=True)


ROLES: dict[str, Callable[[RunConfig], Role | None]] = {
    "policy": _policy,
    "reference": _reference,
    "critic": _critic,
    "prm": _prm,
    "prm.reference": _prm_reference,
    "reward.model": _reward_model,
}
"""Name -> the role in the run of a configuration; None where the run has no such model."""

SECTIONS = ("reference", "critic", "prm", "reward.model")
"""Sections of models besides the policy."""
LEARNERS = ("policy", "critic", "prm")
"""Sections of models that learn, in the order of a checkpoint's parts."""


def further_sections(config: RunConfig) -> dict[str, FrozenConfig]:
    """Every section of a model besides the policy, whether the run has that model or not."""
    return {name: attrgetter(name)(config) for name in SECTIONS}


def on_policy_layout(config: RunConfig) -> RunConfig:
    """The configuration with every model on the policy's layout."""
    for name, section in further_sections(config).items():
        config = _replaced(config, name.split("."), replace(section, backend=None))
    return config


def _replaced(section: Any, path: list[str], value: Any) -> Any:
    """A section in which the one at `path` is `value`."""
    inner = value if len(path) == 1 else _replaced(getattr(section, path[0]), path[1:], value)
    return replace(section, **{path[0]: inner})
