"""The allocation string for the layouts of all roles (`launch.allocation`): tree -> tree with a key per role."""

from __future__ import annotations

import copy
import dataclasses
import typing
from typing import Any

from fivefold.config.roles import LEARNERS
from fivefold.config.schema import Sections
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.layout import Allocation, ParallelLayout
from fivefold.layout.parallel import ENGINES

KEY = "launch.allocation"
ROLES = {
    **{name: f"{name}.backend" for name in ("reference", *LEARNERS)},
    "actor": "policy.backend",
    "ref": "reference.backend",
    "reward": "reward.model.backend",
    "rollout": "engine.backend",
    "engine": "engine.backend",
}
"""Name of a layout in brackets -> the key that it sets."""
Tree = dict[str, Any]


def allocated(tree: Tree, findings: Findings) -> Tree:
    """Return the tree with the layouts of `launch.allocation` set in the keys of the roles; a conflicting value is an
    error."""
    text = _get(tree, KEY)
    if not isinstance(text, str):
        return tree
    try:
        keys = keys_of(Allocation.parse(text))
    except UserError as error:
        findings.error(KEY, f": {error}")
        return tree
    changed = copy.deepcopy(tree)
    for key, value in keys.items():
        if (present := _get(tree, key)) is not None and not _same(present, value):
            findings.error(key, f"and {KEY} say different things, {present!r} and {value!r} (of {text!r}): keep one of them")
        *parents, last = key.split(".")
        node = changed
        for parent in parents:
            # A value that is not a section is refused later, as such.
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[last] = value
    return changed


def keys_of(allocation: Allocation) -> dict[str, str | int]:
    """Return the keys and values that an allocation sets; raises ValueError for roles that cannot be placed that way.

    The policy has the first ranks; models on ranks of their own follow in the order of the string.
    """
    settings: dict[str, str | int] = {}
    group_of: dict[str, int] = {}
    for place, group in enumerate(allocation.groups):
        for layout in group:
            key = _key(layout)
            if key in settings:
                raise UserError(
                    f"{key} is set twice, by {settings[key]} and {layout}: give each layout another name in brackets"
                )
            settings[key] = str(dataclasses.replace(layout, name=None))
            group_of[key] = place
    engine, policy = group_of.pop("engine.backend", None), group_of.pop("policy.backend", None)
    trainers = sorted({*group_of.values()} - {policy})
    if policy is None and (len(trainers) > 1 or (trainers and engine is not None)):
        raise UserError(
            f"where other models are depends on the policy: name its layout too, megatron[actor]:...; got {allocation}"
        )
    if engine is not None and engine in trainers:
        raise UserError(
            f"the engine shares the policy's ranks or has devices of its own, not another model's: got {allocation}"
        )
    if policy is not None:
        if engine is not None:
            settings["engine.placement"] = "colocated" if engine == policy else "apart"
        first = allocation.groups[policy][0].world_size
        first_ranks = {policy: 0}
        for place in trainers:
            first_ranks[place], first = first, first + allocation.groups[place][0].world_size
        settings |= {key.replace(".backend", ".first_rank"): first_ranks[place] for key, place in group_of.items()}
    return settings


def _key(layout: ParallelLayout) -> str:
    """Return the key that a layout sets, by its name or else by its backend."""
    is_engine = layout.backend in ENGINES
    if layout.name is None:
        return "engine.backend" if is_engine else "policy.backend"
    if (key := ROLES.get(layout.name)) is None:
        raise UserError(f"no role is called {layout.name!r}; known: {', '.join(ROLES)}")
    if is_engine != (key == "engine.backend"):
        raise UserError(f"{layout.name} is {'no engine' if is_engine else 'an engine'}: got {layout}")
    if not _exists(key):
        raise UserError(f"{layout.name} has no layout of its own, it is on the policy's: leave {layout} out")
    return key


def _exists(key: str) -> bool:
    """Whether the schema has the key."""
    part: Any = Sections
    for name in key.split("."):
        if not dataclasses.is_dataclass(part) or name not in (hints := typing.get_type_hints(part)):
            return False
        part = hints[name]
    return True


def _get(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _same(present: Any, value: str | int) -> bool:
    """Whether two values are equal; layouts are compared regardless of spelling."""
    if isinstance(value, int):
        return bool(present == value)
    try:
        return ParallelLayout.parse(str(present)) == ParallelLayout.parse(value)
    except UserError:
        return bool(present == value)
