"""Defaults of dataclasses from their source text: nothing of it is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fivefold.config.dialect import Tree

_DEPTH = 12
_SAME = ("deepcopy", "copy", "expanduser", "DictConfig", "float", "str", "list", "dict")
"""Functions whose value is their argument's, as a configuration would write it."""


class UnreadableDefaultError(ValueError):
    """A default that only running the program could tell."""


@dataclass
class Classes:
    """Classes and constants of several modules; a name that several modules have is that of the first."""

    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """`Class.field` of defaults that cannot be read."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Classes:
        known = cls()
        for text in texts:
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef):
                    known.classes.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    known.constants.setdefault(node.targets[0].id, node.value)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                    known.constants.setdefault(node.target.id, node.value)
        return known

    def tree(self, name: str, depth: int = 0, **arguments: Any) -> Tree:
        """The fields of an instance, as a tree; fields without a default are left out."""
        tree: Tree = {}
        for owner in self._family(name):
            for node in owner.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    self._take(owner.name, node, tree, depth)
        return tree | arguments

    def _family(self, name: str) -> list[ast.ClassDef]:
        """The class after those that it inherits from."""
        node = self.classes[name]
        bases = [re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2] for base in node.bases]
        return [ancestor for base in reversed(bases) if base in self.classes for ancestor in self._family(base)] + [node]

    def _take(self, owner: str, node: ast.AnnAssign, tree: Tree, depth: int) -> None:
        assert isinstance(node.target, ast.Name)
        name, default = node.target.id, node.value
        if "ClassVar" in ast.unparse(node.annotation):
            return
        if isinstance(default, ast.Call) and ast.unparse(default.func).endswith("field"):
            given = {word.arg: word.value for word in default.keywords}
            if isinstance(given.get("init"), ast.Constant) and given["init"].value is False:  # type: ignore[attr-defined]
                return
            default = given.get("default")
            if "default_factory" in given:
                made = given["default_factory"]
                default = made.body if isinstance(made, ast.Lambda) else ast.Call(made, [], [])
        if default is None or ast.unparse(default) in ("MISSING", "omegaconf.MISSING"):
            tree.pop(name, None)
            return
        try:
            tree[name] = self._value(default, depth)
        except UnreadableDefaultError:
            self.unread.append(f"{owner}.{name}")

    def _value(self, node: ast.expr, depth: int) -> Any:
        if depth > _DEPTH:
            raise UnreadableDefaultError(ast.unparse(node))
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            pass
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self._value(self.constants[node.id], depth + 1)
        if isinstance(node, ast.Attribute):
            return self._of_enumeration(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in _SAME and len(node.args) == 1:
                return self._value(node.args[0], depth + 1)
            if name == "int" and len(node.args) == 1:
                return int(self._value(node.args[0], depth + 1))
            if name in ("dict", "list", "tuple", "set") and not node.args and not node.keywords:
                return {} if name == "dict" else []
            if name in self.classes and not node.args:
                given = {word.arg: self._value(word.value, depth + 1) for word in node.keywords if word.arg}
                return self.tree(name, depth + 1, **given)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._value(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {ast.literal_eval(key): self._value(value, depth + 1)
                    for key, value in zip(node.keys, node.values, strict=True) if key}  # fmt: skip
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Pow)):
            left, right = self._value(node.left, depth + 1), self._value(node.right, depth + 1)
            return left * right if isinstance(node.op, ast.Mult) else left**right
        raise UnreadableDefaultError(ast.unparse(node))

    def _of_enumeration(self, node: ast.Attribute) -> Any:
        parts = ast.unparse(node).split(".")
        owner, member = (
            (parts[-3], parts[-2]) if parts[-1] in ("value", "name") and len(parts) > 2 else (parts[-2], parts[-1])
        )
        if parts[-1] == "name":
            return member
        for statement in self.classes[owner].body if owner in self.classes else []:
            if (
                isinstance(statement, ast.Assign)
                and isinstance(statement.targets[0], ast.Name)
                and statement.targets[0].id == member
            ):
                return self._value(statement.value, 0)
        raise UnreadableDefaultError(ast.unparse(node))
