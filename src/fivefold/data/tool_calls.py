"""Text of a model's turn -> tool calls, as chat templates write them.

A parser is a row of `PARSERS`. data/dialog.py chooses the one that reads back what the template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold.errors import UserError, shown

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""


@dataclass(frozen=True)
class ToolCall:
    """One call in a model's turn."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the call cannot be read; None if it can."""


@dataclass(frozen=True)
class Parser:
    """Reads the calls of one family of chat templates."""

    block: re.Pattern[str]
    """Matches the text of one call, or of a list of them; its group is what `read` takes."""
    read: Callable[[str, Schemas], ToolCall | list[ToolCall]]
    """Reads what a block holds; raises ValueError if it is malformed."""
    mark: str
    """Text that begins a call. One that no block covers is a malformed call."""
    wrapper: re.Pattern[str] | None = None
    """Matches text around all calls that is not part of the turn's content."""
    channels: Callable[[str, bool], dict[str, str]] | None = None
    """Splits what is left of a turn, with or without calls, into the keys of a message that the template takes."""

    def __call__(self, text: str, schemas: Schemas) -> tuple[dict[str, str], list[ToolCall]]:
        """Return the turn without its calls, as keys of a message, and the calls in their order."""
        calls = [call for match in self.block.finditer(text) for call in self._read(match[1], schemas)]
        rest = self.block.sub("", text)
        for _ in range(rest.count(self.mark)):
            calls.append(ToolCall("", error=f"a call begins with {self.mark!r} and does not end"))
        rest = rest.partition(self.mark)[0]
        rest = (self.wrapper.sub("", rest) if self.wrapper else rest).strip()
        return {"content": rest} if self.channels is None else self.channels(rest, bool(calls)), calls

    def _read(self, text: str, schemas: Schemas) -> list[ToolCall]:
        try:
            calls = self.read(text, schemas)
        except (ValueError, RecursionError) as error:
            return [ToolCall("", error=f"the call cannot be read: {error}")]
        return calls if isinstance(calls, list) else [calls]


def _json_call(key: str, name: str = "name") -> Callable[[str, Schemas], ToolCall | list[ToolCall]]:
    """Return a reader of `{NAME: ..., KEY: {...}}`, or of a list of these."""

    def call(value: Any) -> ToolCall:
        if not isinstance(value, dict) or not isinstance(value.get(name), str):
            raise UserError(f'a call is {{"{name}": ..., "{key}": {{...}}}}')
        return ToolCall(value[name], _mapping(value.get(key, {})))

    def read(text: str, schemas: Schemas) -> ToolCall | list[ToolCall]:
        values = json.loads(text)
        return [call(value) for value in values] if isinstance(values, list) else call(values)

    return read


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"arguments are a JSON object: got {shown(value)}")
    return value


def _tagged(head: str, pair: str) -> Callable[[str, Schemas], ToolCall]:
    """Return a reader of calls that write each argument between tags; `head` matches the name, `pair` an argument."""

    def read(text: str, schemas: Schemas) -> ToolCall:
        if (begin := re.match(head, text)) is None:
            raise UserError("it does not begin with the name of a tool")
        name, rest = begin[1].strip(), text[begin.end() :]
        if left := re.sub(pair, "", rest, flags=re.DOTALL).strip():
            raise UserError(f"unexpected text among its arguments: {shown(left, 60)}")
        types = schemas.get(name, {}).get("properties", {})
        pairs = re.findall(pair, rest, re.DOTALL)
        return ToolCall(name, {key: _typed(value, types.get(key, {})) for key, value in pairs})

    return read


_PYTHON = {"True": True, "False": False, "None": None}
"""Values that templates write as Python does."""


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument whose text has no type of its own, by its schema: text, or the JSON value."""
    if schema.get("type", "string") == "string":
        return text
    try:
        return _PYTHON[text] if text in _PYTHON else json.loads(text)
    except ValueError:
        # The check against the schema names the type.
        return text


def _deepseek(text: str, schemas: Schemas) -> ToolCall:
    name, _, rest = text.partition("\n")
    return ToolCall(name.strip(), _mapping(json.loads(rest.strip().removeprefix("```json").removesuffix("```"))))


def _arguments(text: str, schemas: Schemas) -> ToolCall:
    """Return a call that is written as its name, for some models its id, and JSON."""
    name, _, rest = text.partition("[ARGS]")
    return ToolCall(name.partition("[CALL_ID]")[0].strip(), _mapping(json.loads(rest)))


_GEMMA = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[^\s{}\[\],:<]+)(?=\s*:)|(?P<other>[{}\[\],:]|[^\s{}\[\],:<]+)""", re.DOTALL
)


def _gemma(text: str, schemas: Schemas) -> ToolCall:
    """Return a call whose arguments are JSON with bare keys, and texts between tokens in place of quotation marks."""
    name, brace, rest = text.partition("{")

    def as_json(part: re.Match[str]) -> str:
        words = part["key"] if part["text"] is None else part["text"]
        return str(part["other"]) if words is None else json.dumps(words)

    return ToolCall(name.strip(), _mapping(json.loads(_GEMMA.sub(as_json, brace + rest))))


def _harmony(text: str, schemas: Schemas) -> ToolCall:
    head, _, rest = text.partition("<|message|>")
    name = re.split(r"[\s<]", head.strip(), maxsplit=1)[0]
    return ToolCall(name.removeprefix("functions."), _mapping(json.loads(rest)))


_HARMONY_END = r"(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)"
_HARMONY_MESSAGE = re.compile(
    rf"(?:<\|start\|>assistant)?(?:<\|channel\|>(\w+))?[^<]*<\|message\|>(.*?){_HARMONY_END}", re.DOTALL
)


def _harmony_channels(text: str, has_calls: bool) -> dict[str, str]:
    thinking = "\n".join(body for channel, body in _HARMONY_MESSAGE.findall(text) if channel == "analysis")
    content = _HARMONY_MESSAGE.sub(lambda match: "" if match[1] == "analysis" else match[2], text).strip()
    if has_calls and thinking and content:
        # The template takes one of the two next to a call.
        thinking, content = f"{thinking}\n{content}", ""
    return {"content": content, **({"thinking": thinking} if thinking else {})}


_COHERE_THINKING = re.compile(r"<\|START_THINKING\|>(.*?)<\|END_THINKING\|>", re.DOTALL)


def _cohere_channels(text: str, has_calls: bool) -> dict[str, str]:
    thinking = "".join(_COHERE_THINKING.findall(text))
    content = re.sub(r"<\|(?:START|END)_RESPONSE\|>", "", _COHERE_THINKING.sub("", text)).strip()
    # Templates of different ages take it by different names.
    return {"content": content, **({"reasoning_content": thinking, "tool_plan": thinking} if thinking else {})}


PARSERS: dict[str, Parser] = {
    "json": Parser(re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL), _json_call("arguments"), "<tool_call>"),
    "xml": Parser(
        re.compile(r"<tool_call>\s*<function=(.*?)</function>\s*</tool_call>", re.DOTALL),
        _tagged(r"([^>\n]+)>", r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
        "<tool_call>",
    ),
    "pairs": Parser(
        re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL),
        _tagged(r"([^\n<]+)", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        "<tool_call>",
    ),
    "deepseek": Parser(
        re.compile(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL),
        _deepseek,
        "<｜tool▁call▁begin｜>",
        re.compile(r"<｜tool▁calls▁(?:begin|end)｜>"),
    ),
    "harmony": Parser(
        re.compile(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*\bto=([^\s<]+(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*"
            rf"<\|message\|>.*?){_HARMONY_END}",
            re.DOTALL,
        ),
        _harmony,
        "to=functions.",
        channels=_harmony_channels,
    ),
    "mistral": Parser(re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL), _json_call("arguments"), "[TOOL_CALLS]"),
    "arguments": Parser(
        re.compile(r"\[TOOL_CALLS\]([^\[]*(?:\[CALL_ID\][^\[]*)?\[ARGS\].*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL),
        _arguments,
        "[TOOL_CALLS]",
    ),
    "cohere": Parser(
        re.compile(r"<\|START_ACTION\|>(.*?)<\|END_ACTION\|>", re.DOTALL),
        _json_call("parameters", "tool_name"),
        "<|START_ACTION|>",
        channels=_cohere_channels,
    ),
    "gemma": Parser(re.compile(r"<\|tool_call>call:(.*?)<tool_call\|>", re.DOTALL), _gemma, "<|tool_call>"),
    "whole": Parser(re.compile(r"\A\s*(\{.*\})\s*\Z", re.DOTALL), _json_call("parameters"), '{"name":'),
}
"""Name -> parser: JSON in tags (Qwen2.5, Qwen3), XML (Qwen3.5, Qwen3-Coder), pairs of tags (GLM-4), DeepSeek-V3's tokens,
messages to a recipient (gpt-oss), a token before a list of calls or before each one (Mistral), a list between tokens
(Cohere), texts between tokens (Gemma 4), and a turn that is nothing but one call in JSON (Llama 3.1)."""


def arguments_fault(call: ToolCall, schemas: Schemas) -> str | None:
    """Return why a call cannot be made with these arguments, or None: an unknown tool, or arguments of another schema."""
    if call.error is not None:
        return call.error
    if call.name not in schemas:
        return f"there is no tool {call.name!r}; the tools are {', '.join(schemas)}"
    properties, required = schemas[call.name]["properties"], schemas[call.name].get("required", [])
    if missing := [name for name in required if name not in call.arguments]:
        return f"{call.name} needs the argument {missing[0]!r}"
    for name, value in call.arguments.items():
        if name not in properties:
            return f"{call.name} has no argument {name!r}; it has {', '.join(properties)}"
        if fault := _fault(value, properties[name]):
            return f"{call.name}: the argument {name!r} {fault}"
    return None


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _fault(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return what a value must be by its schema, or None if it is."""
    expected = schema.get("type")
    types = [expected] if isinstance(expected, str) else expected or [*_TYPES]
    # bool is a kind of int in Python, and not in JSON.
    kinds = (
        {"boolean"}
        if isinstance(value, bool)
        else {name for name, python_type in _TYPES.items() if isinstance(value, python_type)}
    )
    if not kinds.intersection(types):
        return f"must be {' or '.join(types)}: got {shown(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(str, schema['enum']))}: got {shown(value)}"
    if isinstance(value, list) and "items" in schema:
        return next((fault for item in value if (fault := _fault(item, schema["items"]))), None)
    return None
