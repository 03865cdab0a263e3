"""Checks an engine's own arguments by name: whether the installed release has them, and whether values have the declared
type."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fivefold.config.packages import import_fault
from fivefold.keys.findings import Findings
from fivefold.keys.ranges import suggest

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


def release_of(version: str, length: int) -> tuple[int, ...]:
    """Return the first numbers of a version: the release of 0.5.10.post1 is (0, 5, 10) in three."""
    return tuple(map(int, version.split(".")[:length]))


def check_release(
    findings: Findings, package: str, name: str, version: str, supported: tuple[tuple[int, ...], tuple[int, ...]]
) -> bool:
    """Add an error if an installed engine cannot be imported or its release is not supported; return whether it can be
    imported."""
    if (fault := import_fault(package)) is not None:
        findings.error("backend", f": {name} {version} is installed, {fault}")
        return False
    first, last = supported
    findings.require(
        first <= release_of(version, len(first)) <= last,
        "backend",
        f": {name} {version} is installed, supported are {dotted(first)} to {dotted(last)}",
    )
    return True


def check_arguments(
    findings: Findings,
    release: str,
    arguments: Mapping[str, Any],
    known: Mapping[str, str],
    ours: Mapping[str, str],
    fixed: Mapping[str, str],
) -> None:
    """Adds errors for arguments that `release` lacks or declares with another type (`known`: name -> type), or that must not
    be set.

    `findings` are at the section that gives the arguments.
    """
    for name, value in arguments.items():
        if name in ours:
            findings.error(name, f"is {ours[name]}: set it there")
        elif name in fixed:
            findings.error(name, f"cannot be set: {fixed[name]}")
        elif name not in known:
            findings.unknown(name, f": {release} has no such argument{suggest(name, known)}")
        elif not _fits(value, known[name]):
            findings.error(name, f"must be {known[name]}, as {release} declares it: got {value!r}")


def declared_fields(sources: Iterable[Path], is_wanted: Callable[[str], bool]) -> dict[str, ast.expr]:
    """Returns name -> annotation of the fields of the wanted classes, read from source: importing an engine takes
    seconds."""
    types: dict[str, ast.expr] = {}
    for source in sources:
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.ClassDef) and is_wanted(node.name):
                fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                types |= {ast.unparse(item.target): item.annotation for item in fields}
    return {name: kind for name, kind in types.items() if not name.startswith("_")}


def _fits(value: Any, declared: str) -> bool:
    """Returns whether a value has the declared type. Only plain types are checked; others are left to the engine."""
    names = [part.strip() for part in declared.split("|")]
    if any(name not in _TYPES for name in names):
        return True
    return any(isinstance(value, _TYPES[name]) and isinstance(value, bool) == (name == "bool") for name in names)


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def flags(arguments: Mapping[str, Any], says_no: bool) -> list[str]:
    """Returns arguments as command line options; `says_no`: options that are off are passed as --no-..."""
    options: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options += [f"--{option}"] if value else [f"--no-{option}"] if says_no else []
        elif isinstance(value, dict):
            options += [f"--{option}", json.dumps(value)]
        elif isinstance(value, list):
            options += [f"--{option}", *map(str, value)]
        elif value is not None:
            options += [f"--{option}", str(value)]
    return options
