"""Text of a model's turn -> tool calls, as chat templates write them.

A parser is a row of `PARSERS`. data/dialog.py chooses the one that reads back what the template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold.errors import UserError, shown

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""
_DEEPEST = 64
"""Largest number of lists and mappings inside each other in a schema, or in the arguments of a call."""


@dataclass(frozen=True)
class Span:
    """Pieces of a text between two marks.

    The patterns of the marks take a time that is linear in the text, so that `among` is linear too: a response is as hostile
    as its reward allows, and `re` holds all threads of the process up while it searches.
    """

    begin: re.Pattern[str]
    end: re.Pattern[str]

    @classmethod
    def of(cls, begin: str, end: str) -> Span:
        """Return the span between the marks that two patterns match."""
        return cls(re.compile(begin), re.compile(end))

    def among(self, text: str) -> Iterator[tuple[re.Match[str], str, int]]:
        """Yield each span from the left: its first mark, what is inside, and the place after its last mark."""
        place = 0
        while (begin := self.begin.search(text, place)) and (end := self.end.search(text, begin.end())):
            yield begin, text[begin.end() : end.start()], (place := end.end())

    def split(self, text: str) -> tuple[str, list[tuple[re.Match[str], str]]]:
        """Return the text without its spans, and the first mark and the inside of each span."""
        rest, spans, place = [], [], 0
        for begin, inside, stop in self.among(text):
            rest.append(text[place : begin.start()])
            spans.append((begin, inside))
            place = stop
        return "".join((*rest, text[place:])), spans


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

    block: Span
    """Finds the text of one call, or of a list of them, which `read` takes."""
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
        rest, blocks = self.block.split(text)
        calls = [call for _, inside in blocks for call in self._read(inside, schemas)]
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
        return [writable(call) for call in calls] if isinstance(calls, list) else [writable(calls)]


def writable(call: ToolCall) -> ToolCall:
    """Return a call whose arguments templates, tokenizers and servers of tools can take; others become an error."""
    level: list[Any] = [call.arguments]
    for _ in range(_DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
    try:
        if level:
            raise UserError(f"they have more than {_DEEPEST} levels")
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        reason = "they contain half a character" if isinstance(error, UnicodeError) else error
        return ToolCall("", error=f"the call cannot be read: its name and arguments must be JSON: {reason}")
    return call


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


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


def _tagged(head: str, pair: Span) -> Callable[[str, Schemas], ToolCall]:
    """Return a reader of calls that write each argument between tags; `head` matches the name, `pair` finds an argument."""

    def read(text: str, schemas: Schemas) -> ToolCall:
        if (begin := re.match(head, text)) is None:
            raise UserError("it does not begin with the name of a tool")
        name = begin[1].strip()
        left, pairs = pair.split(text[begin.end() :])
        if left := left.strip():
            raise UserError(f"unexpected text among its arguments: {shown(left, 60)}")
        types = schemas.get(name, {}).get("properties", {})
        return ToolCall(name, {key[1]: _typed(value, types.get(key[1], {})) for key, value in pairs})

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


_HARMONY_END = r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z"
_HARMONY_MESSAGE = Span.of(
    r"(?:(?=<)|(?<![^<>]))(?:<\|start\|>assistant)?(?:<\|channel\|>(\w++))?[^<>]*+<\|message\|>", _HARMONY_END
)
"""A message with its channel. Its head begins with a token, or where the text after a token does."""


def _harmony_channels(text: str, has_calls: bool) -> dict[str, str]:
    thoughts: list[str] = []
    kept: list[str] = []
    place = 0
    for head, body, stop in _HARMONY_MESSAGE.among(text):
        kept.append(text[place : head.start()])
        (thoughts if head[1] == "analysis" else kept).append(body)
        place = stop
    thinking, content = "\n".join(thoughts), "".join((*kept, text[place:])).strip()
    if has_calls and thinking and content:
        # The template takes one of the two next to a call.
        thinking, content = f"{thinking}\n{content}", ""
    return {"content": content, **({"thinking": thinking} if thinking else {})}


_COHERE_THINKING = Span.of(r"<\|START_THINKING\|>", r"<\|END_THINKING\|>")


def _cohere_channels(text: str, has_calls: bool) -> dict[str, str]:
    rest, thoughts = _COHERE_THINKING.split(text)
    thinking = "".join(inside for _, inside in thoughts)
    content = re.sub(r"<\|(?:START|END)_RESPONSE\|>", "", rest).strip()
    # Templates of different ages take it by different names.
    return {"content": content, **({"reasoning_content": thinking, "tool_plan": thinking} if thinking else {})}


PARSERS: dict[str, Parser] = {
    "json": Parser(Span.of(r"<tool_call>\s*+(?=\{)", r"(?<=\})\s*+</tool_call>"), _json_call("arguments"), "<tool_call>"),
    "xml": Parser(
        Span.of(r"<tool_call>\s*+<function=", r"</function>\s*+</tool_call>"),
        _tagged(r"([^>\n]+)>", Span.of(r"<parameter=([^<>\n]++)>\n?", r"\n?</parameter>")),
        "<tool_call>",
    ),
    "pairs": Parser(
        Span.of(r"<tool_call>", r"</tool_call>"),
        _tagged(r"([^\n<]+)", Span.of(r"<arg_key>([^<]*+)</arg_key>\s*+<arg_value>", r"</arg_value>")),
        "<tool_call>",
    ),
    "deepseek": Parser(
        Span.of(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>", r"<｜tool▁call▁end｜>"),
        _deepseek,
        "<｜tool▁call▁begin｜>",
        re.compile(r"<｜tool▁calls▁(?:begin|end)｜>"),
    ),
    "harmony": Parser(
        Span.of(
            # The head of a message names its recipient before or after the channel.
            r"(?:<\|start\|>assistant(?:<\|channel\|>\w++)?\s*+|<\|channel\|>\w++\s*+|(?<!\s)\s*+(?<![^\s>]))to="
            r"(?=[^\s<>]++(?:<\|channel\|>\w++)?\s*+(?:<\|constrain\|>)?\w*+<\|message\|>)",
            _HARMONY_END,
        ),
        _harmony,
        "to=functions.",
        channels=_harmony_channels,
    ),
    "mistral": Parser(
        Span.of(r"\[TOOL_CALLS\]\s*+(?=\[[^\]]*+\])", r"(?<=\])(?=[^\]]*+\Z)"), _json_call("arguments"), "[TOOL_CALLS]"
    ),
    "arguments": Parser(
        Span.of(r"\[TOOL_CALLS\](?=[^\[]*+(?:\[CALL_ID\][^\[]*+)?\[ARGS\])", r"(?=\[TOOL_CALLS\])|\Z"),
        _arguments,
        "[TOOL_CALLS]",
    ),
    "cohere": Parser(
        Span.of(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
        _json_call("parameters", "tool_name"),
        "<|START_ACTION|>",
        channels=_cohere_channels,
    ),
    "gemma": Parser(Span.of(r"<\|tool_call>call:", r"<tool_call\|>"), _gemma, "<|tool_call>"),
    "whole": Parser(Span.of(r"\A\s*+(?=\{)", r"(?<=\})\s*+\Z"), _json_call("parameters"), '{"name":'),
}
"""Name -> parser: JSON in tags (Qwen2.5, Qwen3), XML (Qwen3.5, Qwen3-Coder), pairs of tags (GLM-4), DeepSeek-V3's tokens,
messages to a recipient (gpt-oss), a token before a list of calls or before each one (Mistral), a list between tokens
(Cohere), texts between tokens (Gemma 4), and a turn that is nothing but one call in JSON (Llama 3.1)."""


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """Return the schema of the arguments of each tool, with those keys alone that `arguments_fault` reads, in their form.

    A server of others wrote it: what is not a schema allows every value, as `true` does in JSON schemas.
    """
    schemas = {}
    for tool in tools:
        parameters = tool["function"]["parameters"]
        properties, required = parameters.get("properties"), parameters.get("required")
        schemas[str(tool["function"]["name"])] = {
            "properties": {name: _known(schema) for name, schema in properties.items()},
            "required": [name for name in required if isinstance(name, str)] if isinstance(required, list) else [],
        }
    return schemas


def _known(schema: Any, deepest: int = _DEEPEST) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    known: dict[str, Any] = {}
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if names and all(isinstance(name, str) and name in _TYPES for name in names):
        known["type"] = types
    if isinstance(schema.get("enum"), list):
        known["enum"] = schema["enum"]
    if deepest and isinstance(schema.get("items"), dict):
        known["items"] = _known(schema["items"], deepest - 1)
    return known


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
