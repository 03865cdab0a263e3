"""Tools that are plain functions: their schemas, from annotations and docstrings."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

from .common import Refusal, Source, load_code, run

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}


class _Function(Source):
    """A function of a user's file."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.schemas = [schema_of(function)]

    async def call(self, environment: int, name: str, arguments: dict[str, Any]) -> Any:
        """Return what the function returns."""
        return await run(self._function, **arguments)


async def load(name: str, settings: dict[str, Any]) -> Source:
    """Return the source of the tool `path/to/file.py:function`."""
    return _Function(load_code(name))


def schema_of(function: Any) -> dict[str, Any]:
    """Return the schema of a plain function as chat templates take it, from its annotations and docstring."""
    hints, name = typing.get_type_hints(function), function.__name__
    about, described = _docstring(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise Refusal(f"environment.tools: the tool {name} takes arguments by name: got {parameter}")
        if parameter.name not in hints:
            raise Refusal(f"environment.tools: the tool {name} needs an annotation for its argument {parameter.name}")
        properties[parameter.name] = _schema(hints[parameter.name], f"{name}, {parameter.name}") | (
            {"description": described[parameter.name]} if parameter.name in described else {}
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _docstring(function: Any) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and those of its arguments in a section `Args:`."""
    about, _, rest = (inspect.getdoc(function) or "").partition("Args:")
    lines = [line for line in rest.splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    described: dict[str, str] = {}
    name = None
    for line, indent in zip(lines, indents, strict=True):
        if indent < indents[0]:
            # The next section begins.
            break
        head, colon, text = line.partition(":")
        if indent > indents[0] and name is not None:
            described[name] = f"{described[name]} {line.strip()}".strip()
        elif colon:
            name = head.partition("(")[0].strip()
            described[name] = text.strip()
    return about.strip(), described


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of an annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is typing.Literal:
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], where)} if inner else {"type": "array"}
    if origin is dict:
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        return {"type": [_schema(part, where)["type"] for part in inner]}
    raise Refusal(
        f"environment.tools: the tool {where}: an argument is str, int, float, bool, list, dict, Literal or None: "
        f"got {hint!r}"
    )
