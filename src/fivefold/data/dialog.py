"""Conversations as tokens: the first context, and what follows each turn of the model.

What the model sampled stays as it is. Where turns are appended, a chat template writes only what others say: it renders a
conversation in which a placeholder stands for the model's turn, and the tokens from the end of that turn on are appended.
Otherwise it renders the whole conversation for each turn, and what differs from the tokens held is a new context.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle, groupby, islice, takewhile
from typing import Any, Literal

from fivefold.data.rows import ROLES, Messages, check_kept
from fivefold.data.tool_calls import PARSERS, Parser, Schemas, ToolCall
from fivefold.errors import UserError, first_line, shown
from fivefold.special_tokens import escape, pattern_of

History = Literal["append", "template"]

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
    history: History = "append"
    """Whether turns are appended, or the template renders the conversation again for each of them."""

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        template: Mapping[str, Any],
        ends: Collection[int],
        tools: Sequence[Mapping[str, Any]] = (),
        history: History = "append",
    ) -> Dialog:
        """Return the dialog for these tools; raises UserError if the template cannot be used for several turns."""
        if not (template.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            raise UserError("data.chat_template: the tokenizer has no chat template, which writes the turns: set one")
        schemas = {str(tool["function"]["name"]): tool["function"]["parameters"] for tool in tools}
        own = {**template, **({"tools": list(tools)} if tools else {})}
        dialog = cls(tokenizer, own, frozenset(ends), schemas, history)
        dialog._check_turns()
        if schemas:
            call = ToolCall(next(iter(schemas)))
            answer = {"role": "tool", "content": "A", "name": call.name, "tool_call_id": "call00000"}
            if dialog.appends:
                dialog.follow([answer], [call])
            else:
                dialog._after([_USER, dialog._turn([call]), answer])
            _ = dialog.parser
        return dialog

    @property
    def appends(self) -> bool:
        """Whether what was sampled stays in the context of later turns, whatever the template would render."""
        return self.history == "append"

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
        rest = self._after([_USER, self._turn(calls), *self.escaped(answers)])
        tokens = self._encode(rest)
        begin = next((place for place, token in enumerate(tokens) if token in self.ends), None)
        if begin is None:
            raise UserError(
                "data.chat_template: the template ends the model's turns with no token at which the engine stops, so "
                f"nothing can be appended to a turn: it writes {shown(rest)} after one; take another template, name its "
                "token in engine.sampling.stop_token_ids, or set environment.history: template"
            )
        return tokens[begin:]

    def again(self, messages: Messages) -> list[int]:
        """Return the context of a turn as the template renders all messages before it."""
        return self._encode(self._text(self.separated(messages), True))

    def separated(self, messages: Messages) -> Messages:
        """Return messages whose thinking has a key of its own, where the template renders turns again and takes this key."""
        if self.appends or not self._takes_reasoning:
            return messages
        found = []
        for message in messages:
            thinking, mark, rest = str(message["content"]).partition("</think>")
            if mark and message["role"] == "assistant" and "reasoning_content" not in message:
                thinking = thinking.strip().removeprefix("<think>").strip()
                message = {**message, "content": rest.lstrip(), "reasoning_content": thinking}
            found.append(message)
        return found

    def continued(self, held: list[int], rendered: list[int]) -> list[int] | None:
        """Return the tokens that follow those held in a rendering; None if it does not begin with their text.

        Tokens held end with a turn of the model, which may have sampled others than the tokenizer makes of its text: these
        stay. A turn that did not end with an end token gets the one that the template writes.
        """
        if rendered[: len(held)] == held:
            return rendered[len(held) :]
        is_ended = held[-1] in self.ends
        # Nothing is encoded across an end token, so it separates the two in the same way.
        number = sum(token in self.ends for token in held) - is_ended
        place = next(islice((place for place, token in enumerate(rendered) if token in self.ends), number, None), None)
        if place is None or (is_ended and rendered[place] != held[-1]):
            return None
        same = self._decode(rendered[:place]) == self._decode(held[:-1] if is_ended else held)
        return rendered[place + is_ended :] if same else None

    def escaped(self, messages: Messages) -> Messages:
        """Return messages whose texts contain no special token, so that they open no turn."""
        pattern = pattern_of(self.tokenizer)
        return [{**each, "content": escape(each["content"], pattern)} for each in messages]

    def cut(self, text: str, limit: int, side: Literal["start", "end"]) -> tuple[str, bool]:
        """Return an observation of at most `limit` tokens, without its start or its end, and whether it was cut."""
        tokens = self._encode(text)
        if len(tokens) <= limit:
            return text, False
        kept = max(0, limit - len(self._encode(_MARK)))
        part = tokens[len(tokens) - kept :] if side == "start" else tokens[:kept]
        words = self._decode(part)
        return (_MARK + words if side == "start" else words + _MARK), True

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def read(self, token_ids: Sequence[int]) -> Answer:
        """Return a sampled turn as a message; with tools, it has the calls that the turn makes."""
        own = list(token_ids[:-1] if token_ids and token_ids[-1] in self.ends else token_ids)
        parser = self.parser if self.schemas else self._splitter
        if parser is None:
            return Answer({"role": "assistant", "content": self.text(own)})
        keys, calls = parser(self._decode(own) if self.appends else self._spoken(own), self.schemas)
        message = {"role": "assistant", **keys}
        return Answer({**message, "tool_calls": self._written(calls)} if calls else message, calls)

    def _spoken(self, token_ids: list[int]) -> str:
        """Return the text of a turn that the template renders again, in which only special tokens read as such."""
        pattern, special = pattern_of(self.tokenizer), self._special
        runs = ((is_special, self._decode(list(run))) for is_special, run in groupby(token_ids, special.__contains__))
        return "".join(text if is_special else escape(text, pattern) for is_special, text in runs)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _splitter(self) -> Parser | None:
        """The parser that separates the channels of a turn where there are no tools; None if it has none."""
        words = "some words"
        said = self._said(words)
        if said is None or self.text(self._encode(said)).strip() == words:
            return None
        split = [parser for parser in PARSERS.values() if parser.channels is not None]
        return next((parser for parser in split if parser(said, {})[0]["content"] == words), None)

    @cached_property
    def parser(self) -> Parser:
        """The parser that reads back the calls that the template writes."""
        turns = self._turns_to_read
        for parser in PARSERS.values():
            if all(self._reads(parser, *turn) for turn in turns):
                return parser
        raise UserError(
            "data.chat_template: no parser reads the tool calls that the template writes, or it writes none; the forms that "
            f"are read are {', '.join(PARSERS)} (docs/environments.md)"
        )

    def history_difference(self) -> str | None:
        """Return where a conversation that is appended differs from what the template renders of all its messages; None if
        nowhere."""
        kinds: list[list[list[ToolCall]]] = [[[]]]
        if self.schemas:
            kinds += [[_CALLS[:1]], [_CALLS[:1], []]]
        return next((found for kind in kinds if (found := self._difference(kind)) is not None), None)

    def _difference(self, kind: Sequence[list[ToolCall]]) -> str | None:
        """Return where a conversation differs whose turns make these calls in turn."""
        messages: Messages = [_USER]
        held = self._text(messages, True)
        begin = _same(held, self._text(messages, False))
        parts: list[tuple[int, str]] = [(begin, "the first context"), (len(held), "what opens the assistant's turn 1")]
        for turn, calls in zip(range(1, _TURNS + 1), cycle(kind), strict=False):
            role = "tool" if calls else "user"
            content = "" if calls else "<think>\nwhy\n</think>\n\nword"
            (own,) = self.separated([{"role": "assistant", "content": content, **self._with(calls)}])
            answer = {"role": role, "content": f"answer {turn}"}
            answer |= {"name": calls[0].name, "tool_call_id": "call00000"} if calls else {}
            thinking = {key: own[key] for key in ("reasoning_content",) if key in own}
            rest = self._after([_USER, self._turn(calls), answer])
            ends = [text for text in map(self._decode, ([token] for token in self.ends)) if text in rest]
            end = min(ends, key=rest.index, default="")
            said = self._said(own["content"], calls, **thinking) or ""
            # A template may drop thinking of the last turn too, which was sampled all the same.
            held += said if calls or "why" in said else content
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
        """Raise UserError unless the same tokens follow each turn of the model, whatever it is; or, where the template
        renders turns again, if it leaves them out."""
        if not self.appends:
            self._after([_USER, self._turn(()), _USER])
            return
        first = self.follow([_USER])
        word, thinking = ({"role": "assistant", "content": f"{text}{_PLACE}"} for text in ("", "<think>\nwhy\n</think>\n\n"))
        other = [[_USER, thinking, _USER], [_USER, {**word, "content": "word"}, _USER, word, _USER]]
        if any(first != (found := self._encode(self._after(each)))[len(found) - len(first) :] for each in other):
            raise UserError(
                "data.chat_template: what the template writes after a turn of the model depends on that turn or its number, "
                "so turns cannot be appended to what was sampled: take another template, or set "
                "environment.history: template"
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

    @cached_property
    def _turns_to_read(self) -> list[tuple[list[ToolCall], str, str]]:
        """Turns as (calls, content, how the template writes them) that a parser must read back: none, one and several calls,
        with nested arguments and text around."""
        needed = [([], "some words"), (_CALLS[:1], ""), (_CALLS[1:], "")]
        # Some templates refuse several calls in a turn or write the first, and some refuse text next to a call.
        allowed = [(_CALLS, ""), (_CALLS[:1], "some words")]
        written = [(*each, self._said(each[1], each[0])) for each in (*needed, *allowed)]
        first = written[1][2]
        return [
            (calls, content, said or "")
            for place, (calls, content, said) in enumerate(written)
            if place < len(needed) or (said is not None and (len(calls) == 1 or said != first))
        ]

    @staticmethod
    def _reads(parser: Parser, calls: list[ToolCall], content: str, said: str) -> bool:
        """Return whether a parser reads a turn back."""
        keys, found = parser(said, {call.name: _SCHEMA for call in _CALLS})
        return found == calls and (bool(calls) or content in keys["content"])

    @cached_property
    def _takes_reasoning(self) -> bool:
        """Whether the template writes the thinking of a turn from a key of its message."""
        return self._said("word", reasoning_content="why") != self._said("word")

    def _said(self, content: str, calls: Sequence[ToolCall] = (), **keys: str) -> str | None:
        """Return a turn as the template writes it, without its end; None if the template refuses it."""
        message = {"role": "assistant", "content": content, **keys, **self._with(calls)}
        try:
            before, whole = self._text([_USER], True), self._text([_USER, message], False)
        except UserError:
            return None
        said = whole[_same(before, whole) :]
        return min((said.partition(self._decode([end]))[0] for end in self.ends), key=len, default=said)

    def _with(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"tool_calls": self._written(calls)} if calls else {}

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

    def _decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, with special ones."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

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
