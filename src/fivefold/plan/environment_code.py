"""User files of environments, tools and agents, as `check` reads them: nothing in them runs. No torch here."""

from __future__ import annotations

import ast
import builtins
import json
import subprocess
import sys
import typing
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from fivefold.config.environment import EnvironmentConfig
from fivefold.environments.pool import variables_of
from fivefold.files import read_text
from fivefold.keys.findings import Findings
from fivefold.user_code import DEFINED, top_level

_SECONDS = 60.0
"""Longest time for an interpreter to look up the modules that a file imports."""
_LOOK_UP = """
import importlib.util, json, sys

def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except ValueError:
        return False

sys.path.append(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if lacks(name)]))
"""
_TYPES = {"str", "int", "float", "bool", "list", "dict", "None"}
_GENERIC = {"Literal", "Optional", "Union", "Annotated", "List", "Dict", "Text"}
"""Names of `typing` that an annotation of a tool may have."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_of(
    findings: Findings, key: str, path: str, environment: EnvironmentConfig, given: Collection[str] = ()
) -> list[ast.stmt] | None:
    """Return the statements of a file's top level, and report what would keep an environment process from importing it.

    None if the file cannot be read. `given`: modules that its process has in any case.
    """
    file = Path(path)
    if not file.is_file():
        findings.error(key, f": no file at {path}")
        return None
    try:
        tree = ast.parse(read_text(file), path)
    except (SyntaxError, RecursionError, ValueError) as error:
        # An interpreter of another version may take what this one refuses.
        findings.require(environment.python is not None, key, f": {path} is not valid Python: {error}")
        return None
    imported = sorted({name for node in tree.body for name in _imported(node)} - {*given})
    for name in _lacking(environment, str(file.parent.resolve()), imported):
        findings.error(
            key,
            f": {path} imports {name}, which {environment.python or sys.executable} cannot find: install it there, or name "
            "an interpreter that has it as environment.python",
        )
    return list(top_level(tree.body))


def _imported(node: ast.stmt) -> list[str]:
    """Return the modules that a statement imports whatever happens before it."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [node.module.partition(".")[0]]
    return []


def _lacking(environment: EnvironmentConfig, directory: str, names: Iterable[str]) -> list[str]:
    """Return the modules that an environment process would not find."""
    others = tuple(name for name in names if name not in sys.stdlib_module_names)
    variables = tuple(sorted(variables_of(environment).items()))
    return _looked_up(environment.python or sys.executable, variables, directory, others) if others else []


@cache
def _looked_up(python: str, variables: tuple[tuple[str, str], ...], directory: str, names: tuple[str, ...]) -> list[str]:
    # -P: an environment process does not import from the directory in which the run was started.
    command = [python, "-P", "-c", _LOOK_UP, directory, *names]
    try:
        answer = subprocess.run(command, env=dict(variables), capture_output=True, timeout=_SECONDS, check=True)
        lacking: list[str] = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        # What keeps an interpreter from starting is no fault of the file.
        return []
    return lacking


def defines(code: list[ast.stmt], name: str) -> bool:
    """Return whether a file may have this name at its top level."""
    return bool({name, "*"} & _bound(code))


def check_methods(findings: Findings, key: str, code: list[ast.stmt], name: str, needed: Collection[str]) -> list[Function]:
    """Check that a class of a file has the methods that are `needed`, and return those that it defines itself.

    What is assigned or imported under the name, and what a class inherits from another file, shows when the run starts.
    """
    classes = {node.name: node for node in code if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return []
    attributes, lineage, is_whole = set[str](), [name], True
    for one in lineage:
        attributes |= _bound(classes[one].body)
        bases = [base.id if isinstance(base, ast.Name) else "" for base in classes[one].bases]
        lineage += [base for base in bases if base in classes and base not in lineage]
        is_whole = is_whole and not [base for base in bases if base not in classes and base != "object"]
    if is_whole:
        for method in needed:
            findings.require(method in attributes, key, f": {name} must have a method {method}")
        has_both = ("state" in attributes) == ("restore" in attributes)
        message = f": {name} must have both methods state and restore, or neither"
        findings.require("step" not in needed or has_both, key, message)
    return [node for node in classes[name].body if isinstance(node, DEFINED)]


def _bound(code: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements bind, except those that they set to None."""
    names = set[str]()
    for node in code:
        if isinstance(node, ast.ClassDef | Function):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_none = isinstance(node.value, ast.Constant) and node.value.value is None
            inner = [part for target in targets for part in ast.walk(target)]
            names |= {part.id for part in inner if isinstance(part, ast.Name) and not is_none}
    return names


def check_tool(findings: Findings, key: str, code: list[ast.stmt], tool: Function, is_method: bool = False) -> None:
    """Check that a model can call a function: by the names of its arguments, with the types of their annotations."""
    arguments = [*tool.args.args[is_method:], *tool.args.kwonlyargs]
    others = [
        *(f"{argument.arg}, /" for argument in tool.args.posonlyargs),
        *(f"*{argument.arg}" for argument in (tool.args.vararg,) if argument),
        *(f"**{argument.arg}" for argument in (tool.args.kwarg,) if argument),
    ]
    message = f": the tool {tool.name} takes arguments by name: got {', '.join(others)}; name each argument"
    findings.require(not others, key, message)
    known = _bound(node for node in code if not isinstance(node, ast.Import | ast.ImportFrom))
    for argument in arguments:
        if argument.annotation is None:
            message = f": the argument {argument.arg!r} of {tool.name} needs an annotation, which the model reads"
            findings.error(key, message)
            return
        message = (
            f": the argument {argument.arg!r} of {tool.name} must be str, int, float, bool, list, dict, Literal or None, "
            f"since the model writes JSON: got {ast.unparse(argument.annotation)}"
        )
        findings.require(not _is_refused(argument.annotation, known), key, message)


def _is_refused(hint: ast.expr, known: set[str]) -> bool:
    """Return whether an annotation is a type of Python that no argument can have; `known`: names that the file defines."""
    match hint:
        case ast.Constant(value=str(text)):
            try:
                return _is_refused(ast.parse(text, mode="eval").body, known)
            except (SyntaxError, RecursionError, ValueError):
                return False
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _is_refused(left, known) or _is_refused(right, known)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            if name in ("list", "List", "Optional", "Union", "Annotated"):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return any(_is_refused(part, known) for part in parts[: 1 if name == "Annotated" else None])
            return _is_refused(hint.value, known)
        case ast.Name(id=name) if name not in known | _TYPES | _GENERIC:
            return hasattr(builtins, name) or name in typing.__all__
    return False
