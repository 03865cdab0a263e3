"""When a conversation that is given again is the one that is held, and what differs otherwise."""

from __future__ import annotations

import json

import pytest

from fivefold.data.histories import difference


def call(arguments) -> dict:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}


HELD = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>\nlong\n</think>\n\nshort", "tool_calls": [call('{"a": 1, "b": [2]}')]},
    {"role": "tool", "content": "3", "tool_call_id": "c"},
]


def changed(place: int, **keys) -> list[dict]:
    return [{**message, **keys} if at == place else message for at, message in enumerate(HELD)]


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (HELD, None),
        ([*HELD, {"role": "user", "content": "more"}], None),
        (changed(2, tool_calls=[call('{"b":[2],"a":1}')]), None),
        (changed(2, tool_calls=[call({"a": 1, "b": [2]})]), None),
        (changed(2, content="short"), None),
        (changed(2, content="short", reasoning_content="long"), None),
        (changed(0, content="be bad"), "system"),
        (HELD[1:], "system"),
        (changed(1, content="b"), "content"),
        (changed(1, content="a "), "content"),
        (changed(2, content="other"), "content"),
        (changed(3, content="4"), "content"),
        (changed(2, tool_calls=[call('{"a": 2, "b": [2]}')]), "calls"),
        (changed(2, tool_calls=[]), "calls"),
        (changed(2, tool_calls=[call("broken")]), "calls"),
        (changed(2, content="<think>\nother\n</think>\n\nshort"), "reasoning"),
        (changed(2, content="short", reasoning_content="other"), "reasoning"),
        (HELD[:3], "shorter"),
    ],
)
def test_a_conversation_given_again_is_equal_or_has_the_cause_of_its_difference(given, cause):
    assert difference(HELD, json.loads(json.dumps(given))) == cause
