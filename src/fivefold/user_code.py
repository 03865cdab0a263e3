"""User functions, named `path/to/file.py:function`, or passed by a user's program. No torch here."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import read_text

DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef)
"""Statements that define a function."""


def is_user_code(name: Any) -> bool:
    """Whether a value is a function, or the name of one in a user's file."""
    return callable(name) or ":" in str(name)


def check_user_code(name: Any) -> None:
    """Raise UserError for a name that `load_user_code` would not find, without running the user's code."""
    if callable(name):
        return
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"{name!r}: no file at {path}")
    if not re.search(
        rf"^\s*(?:def|async def)\s+{re.escape(function)}\b|^{re.escape(function)}\s*=", read_text(Path(path)), re.M
    ):
        raise UserError(f"{name!r}: {path} defines no {function}")


@dataclass(frozen=True)
class Parameters:
    """Parameters of a function."""

    named: tuple[str, ...]
    """Parameters with a name, without `*args` and `**kwargs`."""
    required: tuple[str, ...]
    """Parameters without a default."""
    positional: tuple[str, ...] = ()
    """Required parameters before a `/`, which cannot be passed by name."""
    takes_any: bool = False
    """Whether it has `**kwargs`, or a decorator that may have them."""

    @classmethod
    def of(cls, function: Any) -> Parameters:
        """Return the parameters of a loaded function."""
        every = inspect.signature(function).parameters.values()
        named = [parameter for parameter in every if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
        return cls(
            tuple(parameter.name for parameter in named),
            tuple(parameter.name for parameter in named if parameter.default is parameter.empty),
            tuple(
                parameter.name
                for parameter in named
                if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
            ),
            any(parameter.kind is parameter.VAR_KEYWORD for parameter in every),
        )


def parameters_of(name: str) -> Parameters | None:
    """Return the parameters in a function's `def`, without running the user's code; None if it is not defined by `def`."""
    path, _, function = name.rpartition(":")
    try:
        tree = ast.parse(read_text(Path(path)))
    except (SyntaxError, RecursionError, ValueError) as error:
        raise UserError(f"{name!r}: {path} is not valid Python: {error}") from error
    defined = [node for node in top_level(tree.body) if isinstance(node, DEFINED) and node.name == function]
    if not defined:
        return None
    arguments = defined[-1].args
    by_place = [*arguments.posonlyargs, *arguments.args]
    required = by_place[: len(by_place) - len(arguments.defaults)]
    required += [
        argument for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    if defined[-1].decorator_list:
        # A decorator may pass them, so the loaded function is checked when the run starts.
        required = []
    return Parameters(
        tuple(argument.arg for argument in (*by_place, *arguments.kwonlyargs)),
        tuple(argument.arg for argument in required),
        tuple(argument.arg for argument in arguments.posonlyargs if argument in required),
        arguments.kwarg is not None or bool(defined[-1].decorator_list),
    )


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those within `if`, `try` and `with`."""
    for node in body:
        yield node
        if not isinstance(node, (*DEFINED, ast.ClassDef)):
            yield from top_level([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)])
            for handler in getattr(node, "handlers", []):
                yield from top_level(handler.body)


def load_user_code(name: Any) -> Any:
    """Load the function of `path/to/file.py:function`; the file can import files next to it, an `__init__.py` those of its
    package. A function is returned as it is."""
    check_user_code(name)
    if callable(name):
        return name
    path, _, function = name.rpartition(":")
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(
        f"fivefold_user_{file.stem}_{zlib.crc32(bytes(file)):08x}",
        file,
        submodule_search_locations=[str(file.parent)] if file.name == "__init__.py" else None,
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up the module by name.
    sys.modules[spec.name] = module
    if str(file.parent) not in sys.path:
        # The last place in sys.path: a file next to it must not replace a library of the same name.
        sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return getattr(module, function)


def name_of(function: Any) -> str:
    """Return `path/to/file.py:function` for a function; raises ValueError if other processes cannot load it by that name."""
    must = "a function must be defined by `def` at the top level of a file, so that other processes can load it"
    if not isinstance(function, types.FunctionType):
        raise UserError(f"{must}: got {function!r}")
    # A decorated function is loaded with its decorator, under the name of the file that defines it.
    path, function_name = inspect.unwrap(function).__code__.co_filename, function.__name__
    if function_name == "<lambda>":
        raise UserError(f"{must}: got a lambda in {path}; give it a name")
    if function.__qualname__ != function_name:
        raise UserError(f"{must}: {function.__qualname__} in {path} is defined within another function or class")
    if not Path(path).is_file():
        raise UserError(f"{must}: {function_name} was defined in {path}")
    name = f"{Path(path).resolve()}:{function_name}"
    check_user_code(name)
    return name
