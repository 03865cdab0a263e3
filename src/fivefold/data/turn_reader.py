"""Turns that the model sampled: tokens -> messages with their calls, read by the parser that reads back what the chat
template writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from fivefold.data.chat_template import EXAMPLE_CALLS, ChatTemplate
from fivefold.data.tool_calls import PARSERS, Parser, Schemas, ToolCall
from fivefold.errors import UserError
from fivefold.special_tokens import escape, escape_all, pattern_of, special_ids_of

_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "nested": {"type": "object"}},
}
"""Schema of the arguments of each example of a call."""


@dataclass(frozen=True)
class Answer:
    """The model's turn as a message, with its calls."""

    message: dict[str, Any]
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class TurnReader:
    """Reads turns that were sampled with one chat template."""

    template: ChatTemplate
    schemas: Schemas
    """Name of a tool -> JSON schema of its arguments."""
    escapes: bool
    """Whether text that spells a special token is escaped, since the template renders the turn again."""

    def read(self, token_ids: Sequence[int]) -> Answer:
        """Return a sampled turn as a message; with tools, it has the calls that the turn makes."""
        turn_ids = list(token_ids[:-1] if token_ids and token_ids[-1] in self.template.ends else token_ids)
        parser = self.parser if self.schemas else self._splitter
        if parser is None:
            return Answer({"role": "assistant", "content": self.template.decode(turn_ids, skip_special_tokens=True)})
        keys, calls = parser(self._escaped(turn_ids) if self.escapes else self.template.decode(turn_ids), self.schemas)
        message = {"role": "assistant", **keys, **({"tool_calls": self.template.written(calls)} if calls else {})}
        # Arguments may spell a special token with escapes of JSON.
        return Answer(escape_all(message, pattern_of(self.template.tokenizer)) if self.escapes else message, calls)

    @cached_property
    def parser(self) -> Parser:
        """The parser that reads back the calls that the template writes."""
        examples = self._examples
        for parser in PARSERS.values():
            if all(self._reads(parser, *example) for example in examples):
                return parser
        raise UserError(
            "data.chat_template: no parser reads the tool calls that the template writes, or it writes none; the forms that "
            f"are read are {', '.join(PARSERS)} (docs/environments.md)"
        )

    @cached_property
    def _splitter(self) -> Parser | None:
        """The parser that separates the channels of a turn where there are no tools; None if it has none."""
        words = "some words"
        turn_text = self.template.turn_text(words)
        if (
            turn_text is None
            or self.template.decode(self.template.encode(turn_text), skip_special_tokens=True).strip() == words
        ):
            return None
        split = [parser for parser in PARSERS.values() if parser.channels is not None]
        return next((parser for parser in split if parser(turn_text, {})[0]["content"] == words), None)

    @property
    def _examples(self) -> list[tuple[list[ToolCall], str, str]]:
        """Turns as (calls, content, how the template writes them) that a parser must read back: none, one and several calls,
        with nested arguments and text around."""
        needed = [([], "some words"), (EXAMPLE_CALLS[:1], ""), (EXAMPLE_CALLS[1:], "")]
        # Some templates refuse several calls in a turn or write the first, and some refuse text next to a call.
        allowed = [(EXAMPLE_CALLS, ""), (EXAMPLE_CALLS[:1], "some words")]
        written = [(*example, self.template.turn_text(example[1], example[0])) for example in (*needed, *allowed)]
        first = written[1][2]
        return [
            (calls, content, turn_text or "")
            for place, (calls, content, turn_text) in enumerate(written)
            if place < len(needed) or (turn_text is not None and (len(calls) == 1 or turn_text != first))
        ]

    @staticmethod
    def _reads(parser: Parser, calls: list[ToolCall], content: str, turn_text: str) -> bool:
        """Return whether a parser reads a turn back."""
        keys, read_calls = parser(turn_text, {call.name: _SCHEMA for call in EXAMPLE_CALLS})
        return read_calls == calls and (bool(calls) or content in keys["content"])

    def _escaped(self, token_ids: list[int]) -> str:
        """Return the text of a turn in which only special tokens read as such."""
        pattern, special = pattern_of(self.template.tokenizer), special_ids_of(self.template.tokenizer)
        runs = (
            (is_special, self.template.decode(list(run))) for is_special, run in groupby(token_ids, special.__contains__)
        )
        return "".join(text if is_special else escape(text, pattern) for is_special, text in runs)
