"""What a conversation holds, against what is given again: equal, or why not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_THINKING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def difference(held: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why messages do not begin with those held, a row of BREAKS; None if they do.

    Calls compare as parsed JSON, and an answer of the model equals one without its reasoning.
    """
    for own, other in zip(held, given, strict=False):
        if (cause := _of_message(own, other)) is not None:
            return cause
    return "shorter" if len(given) < len(held) else None


def _of_message(held: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    if held == given:
        return None
    if held["role"] != given["role"]:
        return "system" if "system" in (held["role"], given["role"]) else "content"
    if _calls(held) != _calls(given):
        return "calls"
    if held["role"] != "assistant":
        own = "system" if held["role"] in ("system", "developer") else "content"
        return None if held["content"] == given["content"] else own
    reasoning, content = _reasoned(held)
    other, rest = _reasoned(given)
    if content != rest:
        return "content"
    # Reasoning that a client has dropped is no difference.
    return "reasoning" if other and other != reasoning else None


def _reasoned(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reasoning of an answer and the rest, whether the reasoning is a part of the content or not."""
    content = str(message["content"])
    if reasoning := message.get("reasoning_content"):
        return str(reasoning).strip(), content.strip()
    found = _THINKING.match(content)
    return (found[1].strip(), content[found.end() :].strip()) if found else ("", content.strip())


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], _parsed(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
