"""Conversations as tokens: the first context, and what follows each turn of the model.

What the model sampled stays as it is. A chat template writes only what others say: it renders a conversation in which a
placeholder stands for the model's turn, and the tokens from the end of that turn on are appended.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, Literal

from fivefold.data.rows import ROLES, Messages, check_kept
from fivefold.data.tool_calls import PARSERS, Parser, Schemas, ToolCall
from fivefold.errors import UserError, first_line, shown
from fivefold.special_tokens import escape, pattern_of

_PLACE = "the-turn-0f3b"
"""Text of the model's turn in a rendering of which only the rest is used."""
_MARK = "..."
"""Mark of an observation that was cut."""
_USER = {"role": "user", "content": "Q"}
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "nested": {"type": "object"}},
}
_CALLS = [ToolCall("first", {"text": "a b", "count": 3}), ToolCall("second", {"nested": {"list": [1, {"x": "y"}]}})]
"""Calls that a parser must read back as the chat template writes them."""
_TURNS = 3
"""Turns of the model in the conversations that `history_difference` compares."""


@dataclass(frozen=True)
class Answer:
    """The model's turn as a message, with its calls."""

    message: dict[str, Any]
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class Dialog:
    """Conversations with one tokenizer and chat template."""

    tokenizer: Any
    template: Mapping[str, Any]
    """Arguments of the chat template: its variables, `chat_template` for another template, `tools`."""
    ends: frozenset[int]
    """Tokens at which the engine ends a turn."""
    schemas: Schemas = field(default_factory=dict)
    """Name of a tool -> JSON schema of its arguments."""

    @classmethod
    def of(
        cls, tokenizer: Any, template: Mapping[str, Any], ends: Collection[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Dialog:
        """Return the dialog for these tools; raises UserError if the template cannot be used for several turns."""
        if not (template.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            raise UserError("data.chat_template: the tokenizer has no chat template, which writes the turns: set one")
        schemas = {str(tool["function"]["name"]): tool["function"]["parameters"] for tool in tools}
        dialog = cls(tokenizer, {**template, **({"tools": list(tools)} if tools else {})}, frozenset(ends), schemas)
        dialog._check_turns()
        if schemas:
            name = next(iter(schemas))
            dialog.follow([{"role": "tool", "content": "A", "name": name}], [ToolCall(name)])
            _ = dialog.parser
        return dialog

    def begin(self, messages: Messages) -> tuple[list[int], str]:
        """Return tokens and text of a first context; raises UserError for messages that cannot be written."""
        check_messages(messages)
        text = self._text(messages, True)
        check_kept(messages, text, partial(self._text, open_ended=True))
        return self._encode(text), text

    def follow(self, answers: Messages, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Return the tokens that follow a turn of the model, from its end token to the start of its next turn.

        `answers` are all messages of one step, since templates join tool answers; `calls` are those of the turn. A turn that
        was sampled with the end token has the first of these tokens already.
        """
        check_messages(answers)
        pattern = pattern_of(self.tokenizer)
        safe = [{**each, "content": escape(each["content"], pattern)} for each in answers]
        rest = self._after([_USER, self._turn(calls), *safe])
        tokens = self._encode(rest)
        begin = next((place for place, token in enumerate(tokens) if token in self.ends), None)
        if begin is None:
            raise UserError(
                "data.chat_template: the template ends the model's turns with no token at which the engine stops, so "
                f"nothing can be appended to a turn: it writes {shown(rest)} after one; take another template, or name its "
                "token in engine.sampling.stop_token_ids"
            )
        return tokens[begin:]

    def cut(self, text: str, limit: int, side: Literal["start", "end"]) -> tuple[str, bool]:
        """Return an observation of at most `limit` tokens, without its start or its end, and whether it was cut."""
        tokens = self._encode(text)
        if len(tokens) <= limit:
            return text, False
        kept = max(0, limit - len(self._encode(_MARK)))
        part = tokens[len(tokens) - kept :] if side == "start" else tokens[:kept]
        words = str(self.tokenizer.decode(part, skip_special_tokens=False))
        return (_MARK + words if side == "start" else words + _MARK), True

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def read(self, token_ids: Sequence[int]) -> Answer:
        """Return a sampled turn as a message; with tools, it has the calls that the turn makes."""
        own = list(token_ids[:-1] if token_ids and token_ids[-1] in self.ends else token_ids)
        text = str(self.tokenizer.decode(own, skip_special_tokens=not self.schemas))
        if not self.schemas:
            return Answer({"role": "assistant", "content": text})
        content, calls = self.parser(text, self.schemas)
        message = {"role": "assistant", "content": content}
        return Answer({**message, "tool_calls": self._written(calls)} if calls else message, calls)

    @cached_property
    def parser(self) -> Parser:
        """The parser that reads back the calls that the template writes."""
        for parser in PARSERS.values():
            if self._proves(parser):
                return parser
        raise UserError(
            "data.chat_template: no parser reads the tool calls that the template writes, or it writes none; the forms that "
            f"are read are {', '.join(PARSERS)} (docs/environments.md)"
        )

    def history_difference(self) -> str | None:
        """Return where a conversation that is appended differs from what the template renders of all its messages; None if
        nowhere."""
        kinds = [("user", ())] + ([("tool", _CALLS[:1])] if self.schemas else [])
        return next((found for role, calls in kinds if (found := self._difference(role, calls)) is not None), None)

    def _difference(self, role: str, calls: Sequence[ToolCall]) -> str | None:
        messages: Messages = [_USER]
        held = self._text(messages, True)
        parts: list[tuple[int, str]] = [(len(held), "the first context")]
        for turn in range(1, _TURNS + 1):
            content = "" if calls else "<think>\nwhy\n</think>\n\nword"
            own = {"role": "assistant", "content": content, **({"tool_calls": self._written(calls)} if calls else {})}
            answer = {"role": role, "content": f"answer {turn}"} | ({"name": calls[0].name} if calls else {})
            whole = self._text([*messages, own], False)
            said = whole[_same(self._text(messages, True), whole) :]
            rest = self._after([_USER, self._turn(calls), answer])
            ends = [self.tokenizer.decode([token], skip_special_tokens=False) for token in self.ends]
            end = next((end for end in ends if end in rest), "")
            held += said.partition(end)[0] if end else said
            parts.append((len(held), f"the assistant's turn {turn}"))
            held += rest[rest.index(end) :]
            parts.append((len(held), f"the answer of role {role} to turn {turn}"))
            messages = [*messages, own, answer]
            rendered = self._text(messages, True)
            if held != rendered:
                place = _same(held, rendered)
                where = next(name for stop, name in parts if place < stop or stop == len(held))
                texts = (shown(text[place:], 60) for text in (held, rendered))
                return f"from turn {turn + 1} on, {where}: {next(texts)}, in the template {next(texts)}"
        return None

    def _check_turns(self) -> None:
        """Raise UserError unless the same tokens follow each turn of the model, whatever it is."""
        first = self.follow([_USER])
        word, thinking = ({"role": "assistant", "content": f"{text}{_PLACE}"} for text in ("", "<think>\nwhy\n</think>\n\n"))
        other = [[_USER, thinking, _USER], [_USER, {**word, "content": "word"}, _USER, word, _USER]]
        if any(first != (found := self._encode(self._after(each)))[len(found) - len(first) :] for each in other):
            raise UserError(
                "data.chat_template: what the template writes after a turn of the model depends on that turn or its number, "
                "so turns cannot be appended to what was sampled: take another template"
            )

    def _after(self, messages: Messages) -> str:
        """Return what the template writes after the placeholder."""
        _, place, rest = self._text(messages, True).partition(_PLACE)
        if not place:
            raise UserError(
                "data.chat_template: the template leaves out "
                f"{'tool calls' if 'tool_calls' in messages[1] else 'what the model says'}: take one that writes them"
            )
        return rest

    def _proves(self, parser: Parser) -> bool:
        """Return whether a parser reads none, one and several calls, with nested arguments and text around, as written."""
        schemas = {call.name: _SCHEMA for call in _CALLS}
        needed = [([], "some words"), (_CALLS[:1], ""), (_CALLS[1:], "")]
        # Some templates refuse several calls in a turn, or text next to a call.
        allowed = [(_CALLS, ""), (_CALLS[:1], "some words")]
        return all(self._reads(parser, schemas, *case) for case in needed) and not any(
            self._reads(parser, schemas, *case) is False for case in allowed
        )

    def _reads(self, parser: Parser, schemas: Schemas, calls: list[ToolCall], content: str) -> bool | None:
        """Return whether a parser reads a turn back; None if the template refuses to write it."""
        message = {"role": "assistant", "content": content, **({"tool_calls": self._written(calls)} if calls else {})}
        try:
            before, whole = self._text([_USER], True), self._text([_USER, message], False)
        except UserError:
            return None
        text = whole[_same(before, whole) :]
        for end in self.ends:
            text = text.partition(self.tokenizer.decode([end], skip_special_tokens=False))[0]
        words, found = parser(text, schemas)
        return found == calls and (bool(calls) or content in words)

    def _turn(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return a turn of the model in which the placeholder comes last."""
        if not calls:
            return {"role": "assistant", "content": _PLACE}
        last = ToolCall(calls[-1].name, {"x": _PLACE})
        return {"role": "assistant", "content": "", "tool_calls": self._written([*calls[:-1], last])}

    def _written(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Return calls in the form that templates take."""
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
    def _takes_text(self) -> bool:
        """Whether the template takes the arguments of a call as JSON text, not as a mapping."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        try:
            self._text([_USER, {"role": "assistant", "content": "", "tool_calls": [call]}], False)
        except UserError:
            return True
        return False

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def _text(self, messages: Messages, open_ended: bool) -> str:
        """Return the rendering of messages; `open_ended`: up to where the model's next turn begins."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=open_ended, **self.template
                )
            )
        except Exception as error:
            # Templates raise errors of many kinds.
            raise UserError(f"the chat template refuses {shown(messages)}: {first_line(error)}") from error


def _same(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def check_messages(messages: Any) -> None:
    """Raise UserError unless these are messages that a chat template can write: known roles and texts, at least one."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"an environment returns a text or a list of messages that is not empty: got {shown(messages)}")
    for each in messages:
        if not isinstance(each, dict) or each.get("role") not in ROLES:
            raise UserError(f"a message has one of the roles {', '.join(ROLES)}: got {shown(each)}")
        if not isinstance(each.get("content"), str):
            raise UserError(f"a message has a text as its content: got {shown(each)}")
