"""Assertion tests, as text -> the program's names that they use, or why a program could cheat them."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import sys
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass

from fivefold.errors import UserError
from fivefold.reward.code.program import GIVEN

_LIBRARY = "solution"
"""Module name under which tests import the program."""


@dataclass(frozen=True)
class Assertions:
    """Assertion tests that run in a process next to the program's."""

    text: str
    """Text of the tests, without their imports of the program."""
    names: dict[str, str]
    """Local name -> name in the program; empty for the program itself."""
    fault: str | None
    """Reason why they cannot be run in a separate process, or None."""


def read_assertions(text: str) -> Assertions:
    """Return the tests of a text; raise ValueError if it is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"assert_code must be Python: {error}") from error
    imports = _Imports()
    tree = imports.visit(tree)
    # A name that the usual imports also define belongs to the program only if the tests use no other name of the program.
    names = _free(tree, hidden=_GIVEN_NAMES) | imports.names or _free(tree)
    return Assertions(ast.unparse(tree), names, _fault(tree, names))


class _Imports(ast.NodeTransformer):
    """Removes the imports of the program."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.module != _LIBRARY:
            return node
        self.names |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name != "*"}
        return ast.Pass()

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        self.names |= {alias.asname or alias.name: "" for alias in node.names if alias.name == _LIBRARY}
        others = [alias for alias in node.names if alias.name != _LIBRARY]
        return ast.Import(others) if others else ast.Pass()


def _free(tree: ast.AST, hidden: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return names that are read but defined neither by the text nor by Python: they belong to the program."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {name: name for name in sorted(read - _bound(tree) - hidden - set(dir(builtins)) - {"__name__", "__file__"})}


def _bound(tree: ast.AST) -> set[str]:
    """Return names that are assigned anywhere in a text."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
    return names


def _given_names() -> frozenset[str]:
    space: dict[str, object] = {}
    exec(GIVEN, space)  # noqa: S102
    return frozenset(space)


_GIVEN_NAMES = _given_names()
_KINDS = ("isinstance", "issubclass", "type", "id")
_SHARED = frozenset((
    "asyncio", "concurrent", "multiprocessing", "subprocess", "threading", "mock", "tempfile", "open", "redirect_stdout",
    "redirect_stderr", "contextlib.redirect_stdout", "contextlib.redirect_stderr", "sys.stdin", "sys.stdout", "sys.stderr",
    "os.environ",
))  # fmt: skip
"""Names that tests use to share files, threads, output or names with the program, which is in another process."""
_ALWAYS_TRUE = (ast.Tuple, ast.List, ast.Set, ast.GeneratorExp, ast.Lambda)
_COMPARED_ORDERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _fault(tree: ast.AST, names: dict[str, str]) -> str | None:
    """Return why tests need more from a program than plain values, as far as their text shows."""
    if not names:
        return "they call nothing of the program"
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if not any(isinstance(node, (ast.Assert, ast.With)) for node in nodes) and not any(
        isinstance(call.func, ast.Attribute) and call.func.attr.startswith("assert") for call in calls
    ):
        return "they assert nothing"
    for module in _imported(nodes):
        if not _is_installed(module):
            return f"they import {module or 'files next to them'}, which is not installed"
    objects = _objects(nodes, names)
    functions = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return next((fault for node in nodes if (fault := _fault_of(node, names, objects, functions))), None)


def _fault_of(node: ast.AST, names: dict[str, str], objects: Set[str], functions: Set[str]) -> str | None:
    """Return why one part of tests needs more from a program than plain values, or None.

    `objects`: variables that are objects of the program's classes; `functions`: names of functions and classes of the tests.
    """
    if (shared := next((word for word in _words(node) if word in _SHARED), None)) is not None:
        return f"they use `{shared}`, and need the program in their own process"
    if isinstance(node, (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)):
        return f"`{_first_line(node)}` is asynchronous"
    if isinstance(node, ast.FunctionDef):
        return _fault_of_function(node)
    if isinstance(node, ast.ClassDef) and any(_mentions(base, names) for base in node.bases):
        return f"`class {node.name}` is made of a class of the program"
    if isinstance(node, ast.Assert) and isinstance(node.test, _ALWAYS_TRUE):
        return f"`{_first_line(node)}` always holds"
    if isinstance(node, ast.ExceptHandler) and node.type is not None and _mentions(node.type, names):
        return f"`except {ast.unparse(node.type)}` is an exception of the program's own"
    if isinstance(node, ast.With) and any(isinstance(part, ast.Raise) for part in ast.walk(node)):
        managers = [getattr(item.context_expr, "func", item.context_expr) for item in node.items]
        if any(_mentions(manager, names.keys() | objects) for manager in managers):
            return f"`{_first_line(node)}` raises where the program may suppress it"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        # `is`, and `in` on an object that tests iterate over, compare nothing of the program's own.
        variables = objects if any(isinstance(operator, _COMPARED_ORDERS) for operator in node.ops) else frozenset()
        if any(_is_class(side, names) or getattr(side, "id", None) in variables for side in sides):
            return f"`{ast.unparse(node)}` compares objects of the program's own class"
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
        if any(_is_class(part, names) or getattr(part, "id", None) in objects for part in parts):
            return f"`{ast.unparse(node)}` computes with objects of the program's own class"
    if isinstance(node, ast.Attribute):
        is_of_program = names.get(getattr(node.value, "id", "")) == ""
        return f"`{ast.unparse(node)}` replaces a part of the program" if is_of_program and _is_set(node) else None
    return _fault_of_call(node, names, functions) if isinstance(node, ast.Call) else None


def _fault_of_function(node: ast.FunctionDef) -> str | None:
    if any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list):
        return f"`{node.name}` is a fixture"
    if node.name.startswith("test") and any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in _direct_parts(node)):
        return f"`{node.name}` yields, and calling it runs nothing"
    return f"`{node.name}` takes fixtures" if node.name.startswith("test_") and _takes_fixtures(node) else None


def _fault_of_call(call: ast.Call, names: dict[str, str], functions: Set[str]) -> str | None:
    function = ast.unparse(call.func)
    if function in _KINDS and any(isinstance(argument, ast.Name) and argument.id in names for argument in call.args):
        return f"`{ast.unparse(call)}` reads a class of the program"
    if _is_true_of_empty(call):
        return f"`{ast.unparse(call)}` holds if the program returns an empty array"
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    handed = [value for value in values if isinstance(value, ast.Lambda) or getattr(value, "id", None) in functions]
    if handed and isinstance(call.func, ast.Name) and call.func.id in names:
        return f"`{ast.unparse(call)}` hands the program a function"
    return None


def _is_true_of_empty(call: ast.Call) -> bool:
    """Return whether a call is numpy's `allclose`, or `all` of a comparison: both hold for an empty array and any other."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("all", "allclose"):
        return False
    values = [call.func.value, *call.args]
    is_compared = any(isinstance(value, ast.Compare) or ".isclose(" in ast.unparse(value) for value in values)
    return call.func.attr == "allclose" or is_compared


def _is_set(node: ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def _direct_parts(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the parts of a function without those of functions in it."""
    parts: list[ast.AST] = list(function.body)
    while parts:
        part = parts.pop()
        yield part
        if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            parts.extend(ast.iter_child_nodes(part))


def _words(node: ast.AST) -> list[str]:
    """Return the names that a part of a text mentions: of a variable, an attribute with what it is of, an import."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [f"{node.value.id}.{node.attr}"]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        module = (getattr(node, "module", None) or "").split(".")
        return [*module, *(word for alias in node.names for word in alias.name.split("."))]
    return []


def _imported(nodes: list[ast.AST]) -> set[str]:
    """Return the packages that a text imports."""
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.partition(".")[0] for module in modules}


@functools.cache
def _is_installed(package: str) -> bool:
    if package in ("pytest", *sys.stdlib_module_names):
        return True
    return bool(package) and importlib.util.find_spec(package) is not None


def _objects(nodes: list[ast.AST], names: dict[str, str]) -> set[str]:
    """Return the variables to which a text assigns objects of a program's class."""
    calls = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    assigned = [node for node in calls if _is_class(node.value, names)]
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def _is_class(node: ast.expr, names: dict[str, str]) -> bool:
    """Return whether an expression is an object of a program's class, judged by capitalized names, or an attribute."""
    if isinstance(node, ast.Call):
        node = node.func
        return isinstance(node, ast.Name) and node.id in names and node.id[:1].isupper()
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def _mentions(node: ast.expr, names: Collection[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _takes_fixtures(test: ast.FunctionDef) -> bool:
    required = [argument.arg for argument in test.args.args[: len(test.args.args) - len(test.args.defaults)]]
    is_given = any("parametrize" in ast.unparse(decorator) for decorator in test.decorator_list)
    return required not in ([], ["self"], ["cls"]) and not is_given
