"""Tools written for verl: `verl:FILE.py`, its `function_tool_path`, and `verl:FILE.yaml`, its `tool_config_path`.

Such files import a few names of verl, which are here too, so that they run where verl is not installed. A tool of a class is
made for one call, as in verl. Its rewards and metrics are left out.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from .common import Refusal, Source, load_code, run
from .functions import schema_of


async def load(tool: str, settings: dict[str, Any]) -> Source:
    """Return the source of a file's tools."""
    _stand_in()
    path = tool.removeprefix("verl:")
    return _Functions(path) if path.endswith(".py") else _Classes(path)


class _Functions(Source):
    """Functions with verl's decorator."""

    def __init__(self, path: str) -> None:
        registry = importlib.import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
        before = set(registry)
        load_code(f"{path}:__name__")
        self._tools = {name: tool for name, tool in registry.items() if name not in before}
        if not self._tools:
            raise Refusal(f"environment.tools: {path} must have functions with the decorator function_tool")
        self.schemas = [_schema(tool.tool_schema) for tool in self._tools.values()]

    async def call(self, environment: int, name: str, arguments: dict[str, Any]) -> Any:
        """Return the text of what a function returns."""
        return _text(await run(self._tools[name].fn, **arguments))


class _Classes(Source):
    """Tools of classes, which a YAML file lists with their schemas."""

    def __init__(self, path: str) -> None:
        yaml = importlib.import_module("yaml")
        schema_class = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema
        self._tools: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        # The classes are named by modules that lie where the run starts.
        sys.path.append(str(Path.cwd()))
        for entry in yaml.safe_load(Path(path).read_text())["tools"]:
            module, _, name = entry["class_name"].rpartition(".")
            described = entry.get("tool_schema")
            schema = None if described is None else schema_class.model_validate(described)
            tool = getattr(importlib.import_module(module), name)(config=entry.get("config", {}), tool_schema=schema)
            self._tools[tool.name] = tool
        self.schemas = [_schema(tool.tool_schema) for tool in self._tools.values()]

    def enter(self, environment: int, task: dict[str, Any]) -> None:
        """Keep what the row has for the tools."""
        self._rows[environment] = (task.get("extra_info") or {}).get("tools_kwargs") or {}

    async def call(self, environment: int, name: str, arguments: dict[str, Any]) -> Any:
        """Return the text of an answer, of a tool that is made for it."""
        tool, row = self._tools[name], self._rows[environment].get(name, {})
        instance, _ = await tool.create(create_kwargs=row.get("create_kwargs", {}))
        try:
            answer, _, _ = await tool.execute(instance, arguments, agent_data=None)
        finally:
            await tool.release(instance)
        return _text(answer)

    async def leave(self, environment: int) -> None:
        """Forget the row."""
        self._rows.pop(environment, None)


def _schema(schema: Any) -> dict[str, Any]:
    described = schema.model_dump(exclude_unset=True, exclude_none=True)
    parameters = {"type": "object", "properties": {}, "required": [], **described["function"].get("parameters", {})}
    return {"type": "function", "function": {**described["function"], "parameters": parameters}}


def _text(answer: Any) -> str:
    answer = answer[0] if isinstance(answer, tuple) else answer
    answer = answer.text if hasattr(answer, "text") else answer
    if isinstance(answer, dict):
        return json.dumps(answer, ensure_ascii=False)
    return "" if answer is None else str(answer)


class _Fields:
    """An object with the fields that it is given, like verl's pydantic models."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._fields.get(name)
        return _Fields(**value) if isinstance(value, dict) else value

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        return cls(**values)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {name: value.model_dump() if isinstance(value, _Fields) else value for name, value in self._fields.items()}


class _FunctionTool:
    def __init__(self, function: Any, name: str, schema: Any) -> None:
        self.fn, self.name = function, name
        if schema is None:
            schema = schema_of(function)
            schema["function"]["name"] = name
        self.tool_schema = schema if isinstance(schema, _Fields) else _Fields(**schema)


class _BaseTool:
    """Like verl's class of this name."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **options: Any) -> tuple[str, Any]:
        return instance_id or str(uuid4()), _Fields()

    async def calc_reward(self, instance_id: str, **options: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **options: Any) -> None:
        pass


def _function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Register a function as a tool, as a plain decorator or with another name."""
    registry = sys.modules["verl.tools.function_tool"].FUNCTION_TOOL_REGISTRY

    def decorate(function: Any, chosen_name: str | None = None) -> Any:
        registry[chosen_name or function.__name__] = _FunctionTool(function, chosen_name or function.__name__, schema)
        return function

    return decorate(name) if inspect.isfunction(name) else lambda function: decorate(function, name)


def _stand_in() -> None:
    """Let files import verl's names for tools where verl itself cannot be imported."""
    try:
        importlib.import_module("verl.tools.function_tool")
    except Exception:
        models = dict.fromkeys(
            ("OpenAIFunctionToolSchema", "OpenAIFunctionSchema", "OpenAIFunctionParametersSchema",
             "OpenAIFunctionPropertySchema", "ToolResponse"), _Fields,
        )  # fmt: skip
        names: dict[str, dict[str, Any]] = {
            "verl": {},
            "verl.tools": {},
            "verl.tools.schemas": models,
            "verl.tools.base_tool": {"BaseTool": _BaseTool},
            "verl.tools.function_tool": {"FUNCTION_TOOL_REGISTRY": {}, "function_tool": _function_tool},
            "verl.utils": {},
            "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
        }
        for name, values in names.items():
            module = sys.modules[name] = ModuleType(name)
            module.__path__ = []
            vars(module).update(values)
