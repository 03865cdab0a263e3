"""A chat template with its tokenizer: messages -> text and tokens, and how the template writes turns of the model.

What a template writes is known only by trying it: examples here are rendered, and the renderings compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from fivefold.data.rows import Messages
from fivefold.data.tool_calls import ToolCall
from fivefold.errors import UserError, first_line, shown

PLACE = "the-turn-0f3b"
"""Text of the model's turn in a rendering of which only the rest is used."""
QUESTION = {"role": "user", "content": "Q"}
"""The message before an example of a turn."""
EXAMPLE_CALLS = [
    ToolCall("first", {"text": "a b", "count": 3}),
    ToolCall("second", {"nested": {"list": [1, {"x": "y"}]}}),
]
"""Calls in examples of turns, with arguments of several types."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with its arguments, and the tokenizer that renders it."""

    tokenizer: Any
    arguments: Mapping[str, Any]
    """Arguments of the chat template: its variables, `chat_template` for another template, `tools`."""
    ends: frozenset[int]
    """Tokens at which the engine ends a turn."""

    def render(self, messages: Messages, open_ended: bool) -> str:
        """Return the rendering of messages; `open_ended`: up to where the model's next turn begins."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=open_ended, **self.arguments
                )
            )
        except Exception as error:
            # Templates raise errors of many kinds.
            raise UserError(f"the chat template refuses {shown(messages)}: {first_line(error)}") from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without any that the tokenizer would add."""
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def turn(self, content: str, calls: Sequence[ToolCall] = (), **keys: str) -> dict[str, Any]:
        """Return a turn of the model as a message, in the form that the template takes."""
        return {
            "role": "assistant",
            "content": content,
            **keys,
            **({"tool_calls": self.written(calls)} if calls else {}),
        }

    def placeholder(self, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        """Return a turn of the model in which the placeholder comes last."""
        if not calls:
            return self.turn(PLACE)
        return self.turn("", [*calls[:-1], ToolCall(calls[-1].name, {"x": PLACE})])

    def after(self, messages: Messages) -> str:
        """Return what the template writes after the placeholder."""
        _, place, rest = self.render(messages, True).partition(PLACE)
        if not place:
            raise UserError(
                "data.chat_template: the template leaves out "
                f"{'tool calls' if 'tool_calls' in messages[1] else 'what the model says'}: take one that writes them"
            )
        return rest

    def turn_text(self, content: str, calls: Sequence[ToolCall] = (), **keys: str) -> str | None:
        """Return a turn as the template writes it, without its end; None if the template refuses it."""
        turn = self.turn(content, calls, **keys)
        try:
            before, after = self.render([QUESTION], True), self.render([QUESTION, turn], False)
        except UserError:
            return None
        turn_text = after[common_length(before, after) :]
        return min((turn_text.partition(self.decode([end]))[0] for end in self.ends), key=len, default=turn_text)

    def written(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Return calls in the form that the template takes."""
        return [
            {
                "id": f"call{number:05}",
                "type": "function",
                "function": {
                    "name": call.name or "unknown",
                    "arguments": json.dumps(call.arguments) if self._takes_text else call.arguments,
                },
            }
            for number, call in enumerate(calls)
        ]

    @cached_property
    def takes_reasoning(self) -> bool:
        """Whether the template writes the thinking of a turn from a key of its message."""
        return self.turn_text("word", reasoning_content="why") != self.turn_text("word")

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template takes the arguments of a call as JSON text, not as a mapping."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        try:
            self.render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], False)
        except UserError:
            return True
        return False


def common_length(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
