"""Strict loading: YAML text and `key=value` overrides -> a typed tree, or an error that says what to write."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fivefold.config.schema import RunConfig

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used: every fault found, one a line."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise ConfigError([f"key {key!r} is given twice (line {key_node.start_mark.line + 1})"])
        seen.add(key)
    return loader.construct_mapping(node)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """RunConfig from a YAML file and `a.b.c=value` overrides; raises ConfigError with every fault found."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError([f"no configuration file at {path}"])
    try:
        # _UniqueKeyLoader is a SafeLoader: it builds plain values only.
        tree = yaml.load(path.read_text(), Loader=_UniqueKeyLoader)  # noqa: S506
    except yaml.YAMLError as error:
        raise ConfigError([f"{path} is not valid YAML: {error}"]) from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError([f"{path} must hold a mapping of keys, got {type(tree).__name__}"])
    for override in overrides or []:
        _apply_override(tree, override)
    faults: list[str] = []
    config = _build(RunConfig, tree, "", faults)
    if faults:
        raise ConfigError(faults)
    assert isinstance(config, RunConfig)
    if problems := config.problems():
        raise ConfigError(problems)
    return config


def dump_yaml(config: Any) -> str:
    """The whole resolved tree as YAML that `load_config` reads back to an equal one."""
    text: str = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
    return text


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError([f"an override is written key=value, for example trainer.steps=10: got {override!r}"])
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    *parents, last = key.strip().split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[last] = value


def _build(cls: type[T], value: Any, path: str, faults: list[str]) -> T | None:
    """An instance of dataclass `cls` from a mapping; faults are appended, not raised."""
    if not isinstance(value, dict):
        faults.append(f"{path or 'the file'} must be a mapping of keys, got {value!r}")
        return None
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    before = len(faults)
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            faults.append(f"unknown key {where!r}{_suggest(str(key), list(fields), path)}")
            continue
        arguments[key] = _convert(hints[key], item, where, faults)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in arguments:
            faults.append(f"{path + '.' if path else ''}{name} is required: it has no default")
    if len(faults) > before:
        return None
    return cls(**arguments)


def _suggest(key: str, known: list[str], path: str) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f": did you mean {(path + '.' if path else '') + close[0]!r}?"
    return f"; known here: {', '.join(known)}"


def _convert(hint: Any, value: Any, path: str, faults: list[str]) -> Any:
    """`value` as the type `hint`; YAML's loose spellings (1e-6 as text, ints for floats) are read."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        if value is None and type(None) in arguments:
            return None
        if len(options) == 1:
            return _convert(options[0], value, path, faults)
        for option in options:
            trial: list[str] = []
            converted = _convert(option, value, path, trial)
            if not trial:
                return converted
        faults.append(f"{path} must be {_describe(hint)}, got {value!r}")
        return None
    if origin is typing.Literal:
        if value in arguments:
            return value
        close = difflib.get_close_matches(str(value), [str(option) for option in arguments], n=1, cutoff=0.6)
        hint_text = f": did you mean {close[0]!r}?" if close else ""
        faults.append(f"{path} must be one of {', '.join(map(str, arguments))}; got {value!r}{hint_text}")
        return None
    if origin is list:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and arguments[0] is str:
            value = [value]
        if not isinstance(value, list):
            faults.append(f"{path} must be a list, got {value!r}")
            return None
        return [_convert(arguments[0], item, f"{path}[{i}]", faults) for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            faults.append(f"{path} must be a mapping, got {value!r}")
            return None
        return {str(k): _convert(arguments[1], v, f"{path}.{k}", faults) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value, path, faults)
    if hint is Any:
        return value
    if hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    faults.append(f"{path} must be {_describe(hint)}, got {value!r}")
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
