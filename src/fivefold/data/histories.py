"""What a conversation holds, against what is given again: equal, or why not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_THINKING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def difference(held: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why messages do not begin with those held, a row of BREAKS; None if they do.

    Calls compare as parsed JSON, and an answer of the model equals one without its reasoning.
    """
    for message, other in zip(held, messages, strict=False):
        if (cause := _of_message(message, other)) is not None:
            return cause
    return "shorter" if len(messages) < len(held) else None


def _of_message(held: Mapping[str, Any], message: Mapping[str, Any]) -> str | None:
    if held == message:
        return None
    if held["role"] != message["role"]:
        return "system" if "system" in (held["role"], message["role"]) else "content"
    if _calls(held) != _calls(message):
        return "calls"
    if held["role"] != "assistant":
        cause = "system" if held["role"] in ("system", "developer") else "content"
        return None if held["content"] == message["content"] else cause
    reasoning, content = _reasoned(held)
    other, rest = _reasoned(message)
    if content != rest:
        return "content"
    # Reasoning that a client has dropped is no difference.
    return "reasoning" if other and other != reasoning else None


def _reasoned(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reasoning of an answer and the rest, whether the reasoning is a part of the content or not."""
    content = str(message["content"])
    if reasoning := message.get("reasoning_content"):
        return str(reasoning).strip(), content.strip()
    match = _THINKING.match(content)
    return (match[1].strip(), content[match.end() :].strip()) if match else ("", content.strip())


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], _parsed(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
