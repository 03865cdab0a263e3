"""Assertion tests, as text -> the program's names that they use, or why a program could cheat them."""

from __future__ import annotations

import ast
import builtins
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


def _fault(tree: ast.AST, names: dict[str, str]) -> str | None:
    """Return why tests need more from a program than plain values, as far as their text shows."""
    if not names:
        return "they call nothing of the program"
    functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any(isinstance(node, (ast.Assert, ast.With)) for node in ast.walk(tree)) and not any(
        isinstance(call.func, ast.Attribute) and call.func.attr.startswith("assert") for call in calls
    ):
        return "they assert nothing"
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(_is_class(side, names) for side in sides):
                return f"`{ast.unparse(node)}` compares objects of the program's own class"
        elif isinstance(node, (ast.BinOp, ast.UnaryOp)):
            parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            if any(_is_class(part, names) for part in parts):
                return f"`{ast.unparse(node)}` computes with objects of the program's own class"
        elif isinstance(node, ast.ExceptHandler) and node.type is not None and _mentions(node.type, names):
            return f"`except {ast.unparse(node.type)}` is an exception of the program's own"
        elif isinstance(node, ast.ClassDef) and any(_mentions(base, names) for base in node.bases):
            return f"`class {node.name}` is made of a class of the program"
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and _takes_fixtures(node):
            return f"`{node.name}` takes fixtures"
    for call in calls:
        function = ast.unparse(call.func)
        if function in _KINDS and any(isinstance(argument, ast.Name) and argument.id in names for argument in call.args):
            return f"`{ast.unparse(call)}` reads a class of the program"
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        handed = [value for value in values if isinstance(value, ast.Lambda) or getattr(value, "id", None) in functions]
        if handed and isinstance(call.func, ast.Name) and call.func.id in names:
            return f"`{ast.unparse(call)}` hands the program a function"
    if any(isinstance(node, (ast.Import, ast.ImportFrom)) and "mock" in ast.unparse(node) for node in ast.walk(tree)):
        return "they replace parts of the program"
    return None


def _is_class(node: ast.expr, names: dict[str, str]) -> bool:
    """Return whether an expression is an object of a program's class, judged by capitalized names, or an attribute."""
    if isinstance(node, ast.Call):
        node = node.func
        return isinstance(node, ast.Name) and node.id in names and node.id[:1].isupper()
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def _mentions(node: ast.expr, names: dict[str, str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _takes_fixtures(test: ast.FunctionDef) -> bool:
    required = test.args.args[: len(test.args.args) - len(test.args.defaults)]
    is_given = any("parametrize" in ast.unparse(decorator) for decorator in test.decorator_list)
    return bool(required) and required[0].arg != "self" and not is_given
