"""Conversations as tokens: the first context, and what follows each turn of the model.

What the model sampled stays as it is. Where turns are appended, a chat template writes only what others say: it renders a
conversation in which a placeholder stands for the model's turn, and the tokens from the end of that turn on are appended.
Otherwise it renders the whole conversation for each turn, and what differs from the tokens held is a new context.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle, islice
from typing import Any, Literal

from fivefold.data.chat_template import EXAMPLE_CALLS, PLACE, QUESTION, ChatTemplate, common_length
from fivefold.data.rows import ROLES, Messages, check_kept
from fivefold.data.tool_calls import Schemas, ToolCall, schemas_of
from fivefold.data.turn_reader import Answer, TurnReader
from fivefold.errors import UserError, shown
from fivefold.special_tokens import escape_all, pattern_of

History = Literal["append", "template"]
Side = Literal["start", "middle", "end"]

_MARK = "..."
"""Mark of an observation that was cut."""
_LONGEST_TOKEN = 256
"""Number of characters for each token of a limit, above which a text exceeds it."""
_TURNS = 3
"""Turns of the model in the conversations that `history_difference` compares."""


def _kept(length: int, count: int, side: Side) -> tuple[slice, slice]:
    """Return where the first and the last of `count` items lie in a longer list; `side` is what is left out of it."""
    before = {"start": 0, "middle": count // 2, "end": count}[side]
    after = {"start": count, "middle": count // 2, "end": 0}[side]
    return slice(before), slice(length - after, length)


@dataclass(frozen=True)
class Dialog:
    """Conversations with one chat template."""

    template: ChatTemplate
    schemas: Schemas = field(default_factory=dict)
    """Name of a tool -> JSON schema of its arguments."""
    history: History = "append"
    """Whether turns are appended, or the template renders the conversation again for each of them."""

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        arguments: Mapping[str, Any],
        ends: Collection[int],
        tools: Sequence[Mapping[str, Any]] = (),
        history: History = "append",
    ) -> Dialog:
        """Return the dialog for these tools; raises UserError if the template cannot be used for several turns."""
        if not (arguments.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            raise UserError("data.chat_template: the tokenizer has no chat template, which writes the turns: set one")
        schemas = schemas_of(tools)
        all_arguments = {**arguments, **({"tools": _plain_tools(tools, tokenizer)} if tools else {})}
        template = ChatTemplate(tokenizer, all_arguments, frozenset(ends))
        dialog = cls(template, schemas, history)
        dialog._check_turns()
        if schemas:
            call = ToolCall(next(iter(schemas)))
            answer = {"role": "tool", "content": "A", "name": call.name, "tool_call_id": "call00000"}
            if dialog.appends:
                dialog.follow([answer], [call])
            else:
                template.after([QUESTION, template.placeholder([call]), answer])
            _ = dialog.reader.parser
        return dialog

    @property
    def appends(self) -> bool:
        """Whether what was sampled stays in the context of later turns, whatever the template would render."""
        return self.history == "append"

    @cached_property
    def reader(self) -> TurnReader:
        """The reader of turns that the model sampled."""
        return TurnReader(self.template, self.schemas, escapes=not self.appends)

    def begin(self, messages: Messages) -> tuple[list[int], str]:
        """Return tokens and text of a first context; raises UserError for messages that cannot be written."""
        check_messages(messages)
        text = self.template.render(messages, True)
        check_kept(messages, text, partial(self.template.render, open_ended=True))
        return self.template.encode(text), text

    def follow(self, answers: Messages, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Return the tokens that follow a turn of the model, from its end token to the start of its next turn.

        `answers` are all messages of one step, since templates join tool answers; `calls` are those of the turn. A turn that
        was sampled with the end token has the first of these tokens already.
        """
        check_messages(answers)
        rest = self.template.after([QUESTION, self.template.placeholder(calls), *self.escaped(answers)])
        tokens = self.template.encode(rest)
        begin = next((place for place, token in enumerate(tokens) if token in self.template.ends), None)
        if begin is None:
            raise UserError(
                "data.chat_template: the template ends the model's turns with no token at which the engine stops, so "
                f"nothing can be appended to a turn: it writes {shown(rest)} after one; take another template, name its "
                "token in engine.sampling.stop_token_ids, or set environment.history: template"
            )
        return tokens[begin:]

    def again(self, messages: Messages) -> list[int]:
        """Return the context of a turn as the template renders all messages before it."""
        return self.template.encode(self.template.render(self.separated(messages), True))

    def separated(self, messages: Messages) -> Messages:
        """Return messages whose thinking has a key of its own, where the template renders turns again and takes this key."""
        if self.appends or not self.template.takes_reasoning:
            return messages
        separated = []
        for message in messages:
            thinking, mark, rest = str(message["content"]).partition("</think>")
            if mark and message["role"] == "assistant" and "reasoning_content" not in message:
                thinking = thinking.strip().removeprefix("<think>").strip()
                message = {**message, "content": rest.lstrip(), "reasoning_content": thinking}
            separated.append(message)
        return separated

    def continued(self, held: list[int], rendered: list[int]) -> list[int] | None:
        """Return the tokens that follow those held in a rendering; None if it does not begin with their text.

        Tokens held end with a turn of the model, which may have sampled others than the tokenizer makes of its text: these
        stay. A turn that did not end with an end token gets the one that the template writes.
        """
        if rendered[: len(held)] == held:
            return rendered[len(held) :]
        is_ended = held[-1] in self.template.ends
        # Nothing is encoded across an end token, so it separates the two in the same way.
        number = sum(token in self.template.ends for token in held) - is_ended
        place = next(
            islice((place for place, token in enumerate(rendered) if token in self.template.ends), number, None), None
        )
        if place is None or (is_ended and rendered[place] != held[-1]):
            return None
        same = self.template.decode(rendered[:place]) == self.template.decode(held[:-1] if is_ended else held)
        return rendered[place + is_ended :] if same else None

    def escaped(self, messages: Messages) -> Messages:
        """Return messages whose texts contain no special token, so that they open no turn."""
        pattern = pattern_of(self.template.tokenizer)
        return [escape_all(message, pattern) for message in messages]

    def cut(self, text: str, limit: int, side: Side, characters: int | None = None) -> tuple[str, bool]:
        """Return an observation without its `side` where it has more than `limit` tokens, or more than `characters`, and
        whether it was cut. The mark is one of the tokens, and none of the characters."""
        is_cut = characters is not None and len(text) > characters
        if characters is not None and is_cut:
            text = _MARK.join(text[part] for part in _kept(len(text), characters, side))
        most = (limit + 1) * _LONGEST_TOKEN
        is_long = len(text) > most
        if is_long:
            # Nothing of megabytes is encoded, of which some hundred tokens are kept.
            text = "".join(text[part] for part in _kept(len(text), most, side))
        tokens = self.template.encode(text)
        if len(tokens) <= limit and not is_long:
            return text, is_cut
        count = min(len(tokens), max(0, limit - len(self.template.encode(_MARK))))
        return _MARK.join(self.template.decode(tokens[part]) for part in _kept(len(tokens), count, side)), True

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.template.decode(token_ids, skip_special_tokens=True)

    def read(self, token_ids: Sequence[int]) -> Answer:
        """Return a sampled turn as a message; with tools, it has the calls that the turn makes."""
        return self.reader.read(token_ids)

    def history_difference(self) -> str | None:
        """Return where a conversation that is appended differs from what the template renders of all its messages; None if
        nowhere."""
        kinds: list[list[list[ToolCall]]] = [[[]]]
        if self.schemas:
            kinds += [[EXAMPLE_CALLS[:1]], [EXAMPLE_CALLS[:1], []]]
        return next((difference for kind in kinds if (difference := self._difference(kind)) is not None), None)

    def _difference(self, kind: Sequence[list[ToolCall]]) -> str | None:
        """Return where a conversation differs whose turns make these calls in turn."""
        messages: Messages = [QUESTION]
        held = self.template.render(messages, True)
        begin = common_length(held, self.template.render(messages, False))
        parts: list[tuple[int, str]] = [(begin, "the first context"), (len(held), "what opens the assistant's turn 1")]
        for turn, calls in zip(range(1, _TURNS + 1), cycle(kind), strict=False):
            role = "tool" if calls else "user"
            content = "" if calls else "<think>\nwhy\n</think>\n\nword"
            (sampled,) = self.separated([self.template.turn(content, calls)])
            answer = {"role": role, "content": f"answer {turn}"}
            answer |= {"name": calls[0].name, "tool_call_id": "call00000"} if calls else {}
            thinking = {key: sampled[key] for key in ("reasoning_content",) if key in sampled}
            rest = self.template.after([QUESTION, self.template.placeholder(calls), answer])
            ends = [text for text in map(self.template.decode, ([token] for token in self.template.ends)) if text in rest]
            end = min(ends, key=rest.index, default="")
            turn_text = self.template.turn_text(sampled["content"], calls, **thinking) or ""
            # A template may drop thinking of the last turn too, which was sampled all the same.
            held += turn_text if calls or "why" in turn_text else content
            parts.append((len(held), f"the assistant's turn {turn}"))
            held += rest[rest.index(end) :]
            parts.append((len(held), f"the answer of role {role} to turn {turn}"))
            messages = [*messages, sampled, answer]
            rendered = self.template.render(messages, True)
            if held != rendered:
                place = common_length(held, rendered)
                where = next(name for stop, name in parts if place < stop or stop == len(held))
                texts = (shown(text[place:], 60) for text in (held, rendered))
                return f"from turn {turn + 1} on, {where}: {next(texts)}, in the template {next(texts)}"
        return None

    def _check_turns(self) -> None:
        """Raise UserError unless the same tokens follow each turn of the model, whatever it is; or, where the template
        renders turns again, if it leaves them out."""
        if not self.appends:
            self.template.after([QUESTION, self.template.placeholder(), QUESTION])
            return
        first = self.follow([QUESTION])
        word, thinking = ({"role": "assistant", "content": f"{text}{PLACE}"} for text in ("", "<think>\nwhy\n</think>\n\n"))
        other = [[QUESTION, thinking, QUESTION], [QUESTION, {**word, "content": "word"}, QUESTION, word, QUESTION]]
        if any(
            first != (token_ids := self.template.encode(self.template.after(messages)))[len(token_ids) - len(first) :]
            for messages in other
        ):
            raise UserError(
                "data.chat_template: what the template writes after a turn of the model depends on that turn or its number, "
                "so turns cannot be appended to what was sampled: take another template, or set "
                "environment.history: template"
            )


def _plain_tools(tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Return tools whose descriptions contain no special token, so that they open no turn; raises UserError for a name."""
    pattern, plain = pattern_of(tokenizer), []
    for tool in tools:
        try:
            plain.append(escape_all(tool, pattern))
        except RecursionError:
            raise UserError(f"the schema of a tool has at most some hundred levels: got {shown(tool)}") from None
        if plain[-1]["function"]["name"] != tool["function"]["name"]:
            raise UserError(f"the name of a tool contains no special token: got {shown(tool['function']['name'])}")
    return plain


def check_messages(messages: Any) -> None:
    """Raise UserError unless these are messages that a chat template can write: known roles and texts, at least one."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"an environment returns a text or a list of messages that is not empty: got {shown(messages)}")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UserError(f"a message has one of the roles {', '.join(ROLES)}: got {shown(message)}")
        if not isinstance(message.get("content"), str):
            raise UserError(f"a message has a text as its content: got {shown(message)}")
