"""Strict loading: read -> translate -> override -> build, or an error that says what to write instead."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fivefold.config.allocated import allocated
from fivefold.config.dialect import OWN, REFUSED, Dialect, Translation, Tree, find_dialect
from fivefold.config.environment import rewarded
from fivefold.errors import UserError, shown
from fivefold.files import read_text
from fivefold.keys.findings import Findings
from fivefold.keys.identity import key_of
from fivefold.keys.typed import make
from fivefold.user_code import name_of

T = TypeVar("T")
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 4 << 20, 100_000, 30
_LONGEST_NUMBER = 1000
"""Number of characters of a number: Python shows none of more than 4,300 digits, and one as 1:59:59 takes quadratic time."""


class ConfigError(UserError):
    """A configuration that cannot be used; lists every error, one per line."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise ConfigError([f"key {key!r} is given twice (line {key_node.start_mark.line + 1})"])
        seen.add(key)
    return loader.construct_mapping(node)


def _short_number(loader: _UniqueKeyLoader, node: yaml.ScalarNode) -> float:
    if len(node.value) > _LONGEST_NUMBER:
        raise ConfigError([f"a number has at most {_LONGEST_NUMBER} characters (line {node.start_mark.line + 1})"])
    number: float = yaml.SafeLoader.yaml_constructors[node.tag](loader, node)
    return number


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
for _kind in ("int", "float"):
    _UniqueKeyLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _short_number)


def read(path: str | Path) -> Tree:
    """Read the mapping in a YAML file."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError([f"no configuration file at {path}"])
    try:
        text = read_text(path, _MOST_BYTES)
    except UserError as error:
        raise ConfigError([str(error)]) from error
    return read_mapping(text, str(path))


def read_mapping(text: str, path: str) -> Tree:
    """Parse the text of a YAML file, which must hold a mapping."""
    try:
        tree = parse_value(text)
    except ConfigError as error:
        raise ConfigError([f"{path}: {fault}" for fault in error.faults]) from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{path} must hold a mapping of keys, got {type(tree).__name__}"])
    return tree


def parse_value(text: str) -> Any:
    """Parse YAML text; raises ConfigError if it is not YAML or is larger than any configuration."""
    try:
        # _UniqueKeyLoader is a SafeLoader: it builds plain values only.
        value = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(["not valid YAML: it is nested too deeply"]) from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        # PyYAML also lets Python's errors through, for a date like 2020-13-45 or a list as a key.
        raise ConfigError([f"not valid YAML: {error}"]) from error
    _check_size(value)
    return value


def _check_size(value: Any) -> None:
    """Raise ConfigError for values that expand too far: YAML aliases can stand for more values than fit in memory, or for a
    cycle."""
    left, count = [(value, 0)], 0
    while left:
        node, depth = left.pop()
        count += 1
        if count > _MOST_VALUES or depth > _DEEPEST:
            raise ConfigError([f"must have at most {_MOST_VALUES} values, nested at most {_DEEPEST} deep"])
        children = [*node.keys(), *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
        left += [(child, depth + 1) for child in children]


def translate(tree: Tree, overrides: list[str], dialect: str | Dialect | None = None) -> Translation:
    """Return tree and overrides in our spelling, with the outcome for each key of the source."""
    if dialect is None or isinstance(dialect, str):
        dialect = find_dialect(dialect or OWN)
    return dialect(tree, overrides)


def override(tree: Tree, overrides: list[str]) -> Tree:
    """Return the tree with each `a.b.c=value` applied."""
    changed = copy.deepcopy(tree)
    for assignment in overrides:
        _apply_override(changed, assignment)
    return changed


def build(cls: type[T], tree: Tree) -> T:
    """Build the typed configuration `cls` of a tree; raises ConfigError for unknown keys and wrong types."""
    findings = Findings()
    if REFUSED in tree:
        raise ConfigError([_accept_first(tree[REFUSED])])
    config = make(cls, rewarded(allocated(_name_functions(tree, findings), findings)), findings)
    if findings.errors:
        raise ConfigError(findings.errors)
    assert config is not None
    return config


def _accept_first(refused: Any) -> str:
    """Return the message about settings that a translation from another system lacks."""
    named = "".join(f"\n  {sentence}" for sentence in refused) if isinstance(refused, list) else ""
    return f"this run lacks settings of the system that it comes from: delete the key `{REFUSED}` to accept that{named}"


def dump_yaml(config: Any) -> str:
    """Write the whole resolved tree as YAML; `RunConfig.from_yaml` reads it back to an equal configuration."""
    tree = dataclasses.asdict(config, dict_factory=lambda items: {key_of(name): value for name, value in items})
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError([f"an override is written key=value, for example trainer.steps=10: got {shown(override)}"])
    try:
        value = parse_value(text)
    except ConfigError:
        value = text
    *parents, last = key.strip().split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[last] = value


def _name_functions(value: Any, findings: Findings) -> Any:
    """Replace each function in the tree by `path.py:function`, from which other processes load it."""
    if isinstance(value, dict):
        return {_name_functions(key, findings): _name_functions(item, findings.at(str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_name_functions(item, findings.at(f"[{place}]")) for place, item in enumerate(value)]
    if not callable(value):
        return value
    try:
        return name_of(value)
    except UserError as error:
        findings.error("", f": {error}")
        return shown(value)
