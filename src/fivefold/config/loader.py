"""Strict loading: read -> translate -> override -> build -> validate, or an error that says what to write instead."""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fivefold.config.allocated import allocated
from fivefold.config.dialect import OWN, REFUSED, Dialect, Translation, Tree, find_dialect
from fivefold.config.run_config import RunConfig
from fivefold.config.validate import validate
from fivefold.errors import UserError, shown
from fivefold.files import read_text, with_umask
from fivefold.keys.findings import Findings
from fivefold.keys.ranges import suggest
from fivefold.tables import take_rows, write_rows
from fivefold.user_code import name_of

T = TypeVar("T")
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 4 << 20, 100_000, 30


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


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_config(path: str | Path, overrides: list[str] | None = None, dialect: str | Dialect | None = None) -> RunConfig:
    """Load RunConfig from a YAML file and `a.b.c=value` overrides, both in the spelling of `dialect` (our own if left out).

    Raises ConfigError with all errors.
    """
    translation = translate(read(path), overrides or [], dialect)
    return make_config(override(translation.tree, translation.overrides))


def config_of(overrides: list[str]) -> RunConfig:
    """Make RunConfig from `a.b.c=value` alone, without a file; raises ConfigError with all errors and missing keys."""
    tree = override({}, overrides)
    data = tree.get("data")
    missing = (
        [] if isinstance(data, dict) and data.get("train") else ["data.train is required: write data.train=[FILE.jsonl]"]
    )
    try:
        config = make_config(tree)
    except ConfigError as error:
        raise ConfigError([*error.faults, *missing]) from None
    if missing:
        raise ConfigError(missing)
    return config


def make_config(tree: Tree | None = None, /, **sections: Any) -> RunConfig:
    """Make RunConfig from nested mappings, or from one mapping per section; raises ConfigError with all errors.

    A function may be passed wherever `path.py:function` is allowed. `data` may have rows in the place of file names, as a
    list of dicts or a `datasets.Dataset`: they are written below the run's directory.

    Example: `make_config(model={"path": "Qwen/Qwen3-0.6B"}, reward={"functions": {my_reward: 1.0}})`.
    """
    named, rows = take_rows({**(tree or {}), **sections})
    config = build(named)
    if errors := validate(config).errors:
        raise ConfigError(errors)
    if not rows:
        return config
    with with_umask(config.trainer.umask):
        return _with_files(config, write_rows(rows, config.run_dir / "data"))


def _with_files(config: RunConfig, files: dict[str, str]) -> RunConfig:
    """Return the configuration with the files that rows were written to, and the run directory that it had before."""
    data = config.data.renamed(lambda name: files.get(name, name))
    return dataclasses.replace(config, data=data, trainer=dataclasses.replace(config.trainer, run_dir=str(config.run_dir)))


def restore(path: Path) -> RunConfig:
    """Read a configuration from a file with the text of `dump_yaml`. It was validated before, and is not validated again."""
    return build(read(path))


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
    for each in overrides:
        _apply_override(changed, each)
    return changed


def build(tree: Tree) -> RunConfig:
    """Build the typed configuration of a tree; raises ConfigError for unknown keys and wrong types."""
    findings = Findings()
    if REFUSED in tree:
        raise ConfigError([_accept_first(tree[REFUSED])])
    config = _build(RunConfig, allocated(_name_functions(tree, findings), findings), findings)
    if findings.errors:
        raise ConfigError(findings.errors)
    assert config is not None
    return config


def _accept_first(refused: Any) -> str:
    """Return the message about settings that a translation from another system lacks."""
    named = "".join(f"\n  {sentence}" for sentence in refused) if isinstance(refused, list) else ""
    return f"this run lacks settings of the system that it comes from: delete the key `{REFUSED}` to accept that{named}"


def dump_yaml(config: Any) -> str:
    """Write the whole resolved tree as YAML; `load_config` reads it back to an equal configuration."""
    text: str = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
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


_plain_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""Cached types of a section's fields without their marks."""


def _build(cls: type[T], value: Any, findings: Findings) -> T | None:
    """Make an instance of dataclass `cls` from a mapping; errors are collected, not raised."""
    if not isinstance(value, dict):
        findings.error("" if findings.section else "the file", f"must be a mapping of keys, got {shown(value)}")
        return None
    hints = _plain_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    before = len(findings.errors)
    for key, item in value.items():
        if key in fields:
            # null is what a key that is left out has.
            is_null = item is None and fields[key].default is None
            arguments[key] = None if is_null else _convert(hints[key], item, findings.at(key))
        else:
            close = suggest(key, fields, findings.key)
            findings.unknown(str(key), close or f"; known here: {', '.join(fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in value:
            if dataclasses.is_dataclass(hints[name]):
                # Building an empty section reports its keys that have no default.
                _build(hints[name], {}, findings.at(name))
            else:
                findings.error(name, "is required: it has no default")
    if len(findings.errors) > before:
        return None
    return cls(**arguments)


def _convert(hint: Any, value: Any, findings: Findings) -> Any:
    """Convert `value` to the type `hint`; YAML's loose spellings (1e-6 as text, ints for floats) are accepted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        if value is None and type(None) in arguments:
            return None
        if len(options) == 1:
            return _convert(options[0], value, findings)
        for option in options:
            trial = Findings()
            converted = _convert(option, value, trial)
            if not trial.errors:
                return converted
    elif origin is typing.Literal:
        if value in arguments:
            return value
        findings.error("", f"must be one of {', '.join(map(str, arguments))}; got {shown(value)}{suggest(value, arguments)}")
        return None
    elif origin is list:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and arguments[0] is str:
            value = [value]
        if isinstance(value, list):
            return [_convert(arguments[0], item, findings.at(f"[{place}]")) for place, item in enumerate(value)]
        findings.error("", f"must be a list, got {shown(value)}")
        return None
    elif origin is dict:
        if isinstance(value, dict):
            keys = [str(key) if arguments[0] is str else _convert(arguments[0], key, findings.at(str(key))) for key in value]
            items = [_convert(arguments[1], item, findings.at(str(key))) for key, item in value.items()]
            return dict(zip(keys, items, strict=True))
        findings.error("", f"must be a mapping, got {shown(value)}")
        return None
    elif dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value, findings)
    elif hint is Any:
        return value
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    findings.error("", f"must be {_describe(hint)}, got {shown(value)}")
    return None


def _describe(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if dataclasses.is_dataclass(hint):
        return "a mapping of keys"
    return names.get(hint, str(hint))
