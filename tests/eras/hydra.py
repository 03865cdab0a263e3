"""Hydra's composition of a configuration's defaults list, as far as these systems use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from fivefold.config.dialect import Tree
from fivefold_dialects.source import merged

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's compiled loader if it is installed: collecting these tests composes a hundred configurations."""
Reader = Callable[[str], str | None]
"""`group/name.yaml` -> its text, None where there is none."""


def compose(read: Reader, name: str, choices: Mapping[str, str] | None = None) -> Tree:
    """The tree of a configuration; `choices` are what a command line chooses of a group: `engine` -> `megatron`."""
    chosen = dict(choices or {})
    _choose(read, name, chosen, set(chosen))
    tree = _composed(read, name, "", chosen)
    tree.pop("hydra", None)
    return tree


def _parsed(read: Reader, path: str) -> tuple[Tree, list[Any], bool]:
    """Body, defaults list, and whether the body is of the whole configuration whatever section it is asked for."""
    text = read(f"{path}.yaml")
    if text is None:
        raise FileNotFoundError(f"{path}.yaml")
    body: Tree = yaml.load(text, Loader=_LOADER) or {}
    defaults = body.pop("defaults", [])
    is_global = re.match(r"#\s*@package\s+_global_", text) is not None
    return body, defaults if "_self_" in defaults else [*defaults, "_self_"], is_global


def _choose(read: Reader, path: str, chosen: dict[str, str], fixed: set[str]) -> None:
    """Choices of groups at the top level, which names of other files may refer to; `override` wins over what it overrides."""
    _, defaults, _ = _parsed(read, path)
    for entry in reversed(defaults):
        if isinstance(entry, dict):
            (group, option), *_ = entry.items()
            words = group.split()
            if words[-1] not in fixed and (words[0] == "override" or words[-1] not in chosen):
                chosen[words[-1]] = option
                fixed |= {words[-1]} if words[0] == "override" else set()
        elif entry != "_self_" and "@" not in entry:
            _choose(read, entry.lstrip("/"), chosen, fixed)


def _composed(read: Reader, path: str, package: str, chosen: Mapping[str, str]) -> Tree:
    body, defaults, is_global = _parsed(read, path)
    directory = path.rpartition("/")[0]
    trees: list[Tree] = []
    for entry in defaults:
        if entry == "_self_":
            trees.append(_placed(body, "" if is_global else package))
            continue
        if isinstance(entry, dict):
            (group, option), *_ = entry.items()
            if group.startswith("override "):
                continue
            group, at, section = group.partition("@")
            option = chosen.get(group if not at else f"{group}@{section}", chosen.get(group, option))
            option = re.sub(r"\$\{(\w+)\}", lambda named: chosen[named[1]], str(option))
            section, place = section if at else group.lstrip("/").replace("/", "."), f"{group}/{option}"
        else:
            place, _, section = entry.partition("@")
        if option_is_none(place):
            continue
        trees.append(_composed(read, _resolved(directory, place), _below(package, section), chosen))
    return merged(trees)


def option_is_none(place: str) -> bool:
    return place.endswith(("/null", "/None"))


def _resolved(directory: str, place: str) -> str:
    if place.startswith("/"):
        return place[1:]
    parts = directory.split("/") if directory else []
    for part in place.split("/"):
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def _below(package: str, section: str) -> str:
    if section == "_global_":
        return ""
    return ".".join(part for part in (package, section) if part and part != "_here_")


def _placed(body: Tree, package: str) -> Tree:
    for part in reversed(package.split(".") if package else []):
        body = {part: body}
    return body
