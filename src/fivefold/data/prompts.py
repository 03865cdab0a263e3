"""Parquet and jsonl rows -> tokenized prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fivefold.algo.methods import LearnsFrom
from fivefold.data.guarded_rows import SpecialTokens, guard
from fivefold.data.rows import (
    TOOLS_NEED_TEMPLATE,
    USUAL_COLUMNS,
    Columns,
    Messages,
    Row,
    check_kept,
    check_responses,
    parse_row,
    read_rows,
    source_of,
    text_of,
    with_system_prompt,
)
from fivefold.data.stored_prompts import StoredPrompts
from fivefold.errors import UserError
from fivefold.special_tokens import end_of_turn, pattern_of, special_ids_of
from fivefold.types import DatasetResponse, Prompt


@dataclass(frozen=True)
class PromptSet:
    prompts: Sequence[Prompt]
    dropped: int
    """Number of rows left out because their prompt is too long."""

    def ground_truths(self) -> Iterator[tuple[int, str, str]]:
        """Iterate over (id, source, ground truth) of each prompt."""
        if isinstance(self.prompts, StoredPrompts):
            return self.prompts.ground_truths()
        return ((prompt.id, prompt.source, prompt.ground_truth) for prompt in self.prompts)


class Place(NamedTuple):
    """Location of a row."""

    number: int
    """Index of the row over all files, from 0."""
    file: Path
    row: int
    source: str
    """data_source if the row has none."""


@dataclass(frozen=True)
class Reading:
    """Settings for converting rows to prompts."""

    max_prompt_tokens: int
    overlong: Literal["drop", "refuse"] = "drop"
    columns: Columns = USUAL_COLUMNS
    learns_from: LearnsFrom = "rollouts"
    need_responses: bool = False
    max_response_tokens: int = 0
    """Length at which responses to learn from are truncated: the one to imitate, or the chosen and the rejected one."""
    system_prompt: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    template: str | None = None
    """Chat template that replaces the tokenizer's; None: the tokenizer's."""
    apply_chat_template: bool = True
    learned_turns: Literal["all", "last"] = "all"
    max_total_tokens: int | None = None
    """Maximum tokens of a prompt together with a response to learn from."""
    special_tokens: SpecialTokens = "keep"
    """Handling of special tokens in the texts of a row."""

    def prompt_of(self, row: dict[str, Any], at: Place, tokenizer: Any) -> Prompt | None:
        """Convert a row to a prompt; None if it is too long. Raises ValueError naming the row."""
        where = f"{at.file}, row {at.row}"
        # The chat_template argument of apply_chat_template overrides the tokenizer's template.
        arguments = self.template_kwargs | ({} if self.template is None else {"chat_template": self.template})
        try:
            parsed = parse_row(row, self.columns, self.learns_from, at.source)
            if self.apply_chat_template:
                parsed = guard(parsed, self.special_tokens, pattern_of(tokenizer))
            parsed = with_system_prompt(parsed, self.system_prompt)
            if self.need_responses:
                check_responses(parsed, self.columns, self.learns_from, list(map(str, row)))
            if parsed.tools and not (self.apply_chat_template and _has_template(tokenizer, arguments)):
                raise UserError(TOOLS_NEED_TEMPLATE)
            messages, token_ids, text, responses = (
                tokenize(parsed, tokenizer, arguments | parsed.template_kwargs, self.learned_turns)
                if self.apply_chat_template
                else tokenize_as_it_is(parsed, tokenizer)
            )
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        room = (self.max_total_tokens or sys.maxsize) - len(token_ids)
        if len(token_ids) > self.max_prompt_tokens or room < 1:
            if self.overlong == "refuse":
                bound = "max_prompt_tokens" if room >= 1 else "max_total_tokens"
                raise UserError(
                    f"{where}: the prompt has {len(token_ids)} tokens, data.{bound} is {getattr(self, bound)}; "
                    "raise it, or set data.overlong_prompts to drop"
                )
            return None
        return Prompt(
            id=at.number,
            token_ids=token_ids,
            source=parsed.source,
            text=text,
            ground_truth=parsed.ground_truth,
            messages=messages,
            responses=[_truncate(response, min(self.max_response_tokens, room)) for response in responses],
            extra=parsed.extra,
            columns=parsed.columns,
            is_chat=parsed.is_chat,
        )


def load_prompts(files: Sequence[str], tokenizer: Any, reading: Reading, first: int | None = None) -> PromptSet:
    """Load the rows of all files in order, numbered from 0; `first` limits the rows of each file.

    Raises ValueError for a file or row that cannot be used, naming it.
    """
    read = [reading.prompt_of(row, at, tokenizer) for row, at in numbered_rows(files, first)]
    prompts = [prompt for prompt in read if prompt is not None]
    return PromptSet(prompts, not_empty(files, reading, len(prompts), len(read) - len(prompts)))


def numbered_rows(files: Sequence[str], first: int | None = None) -> Iterator[tuple[dict[str, Any], Place]]:
    """Yield the rows of all files in order; `first` limits the rows of each file."""
    number = count()
    for path in map(Path, files):
        rows = enumerate(islice(read_rows(path), first))
        source = source_of(path)
        for place, row in rows:
            yield row, Place(next(number), path, place, source)


def not_empty(files: Sequence[str], reading: Reading, rows_left: int, dropped: int) -> int:
    """Return `dropped`; raises ValueError if no prompt was kept."""
    if not rows_left:
        raise UserError(
            f"no prompts left in {', '.join(files)}: {dropped} were longer than {reading.max_prompt_tokens} tokens"
        )
    return dropped


def tokenize(
    row: Row, tokenizer: Any, template_kwargs: dict[str, Any] | None = None, learned_turns: Literal["all", "last"] = "all"
) -> tuple[Messages, list[int], str, list[DatasetResponse]]:
    """(messages, tokens and text of the prompt, responses to learn from)."""
    if row.is_conversation and learned_turns == "last":
        return last_turn(row.messages, tokenizer, template_kwargs)
    if row.is_conversation:
        return conversation(row.messages, tokenizer, template_kwargs)
    token_ids, text = render(row.messages, tokenizer, template_kwargs)
    return row.messages, token_ids, text, [_response(one, tokenizer) for one in row.responses]


def tokenize_as_it_is(row: Row, tokenizer: Any) -> tuple[Messages, list[int], str, list[DatasetResponse]]:
    """(messages, tokens, text, responses) of a prompt that is plain text and needs no chat template."""
    text = text_of(row)
    if not (token_ids := [int(token) for token in tokenizer.encode(text)]):
        raise UserError(f"the prompt has no tokens: {text!r}")
    return row.messages, token_ids, text, [_response(one, tokenizer) for one in row.responses]


def _response(text: str, tokenizer: Any) -> DatasetResponse:
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return DatasetResponse(token_ids, [True] * len(token_ids), text)


def _truncate(response: DatasetResponse, limit: int) -> DatasetResponse:
    if len(response.token_ids) <= limit:
        return response
    return DatasetResponse(response.token_ids[:limit], response.loss_mask[:limit], response.text, truncated=True)


def conversation(
    messages: Messages, tokenizer: Any, template_kwargs: dict[str, Any] | None = None
) -> tuple[Messages, list[int], str, list[DatasetResponse]]:
    """Split a conversation whose assistant turns are all learned: (messages before the first one, their tokens, text,
    rest)."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = messages[: turns[0]]
    token_ids, text = render(prompt, tokenizer, template_kwargs)
    rest: list[int] = []
    loss_mask: list[bool] = []
    text_so_far = text
    # Plain text ends with no token of a template, and unknown letters are no end.
    ends = special_ids_of(tokenizer) - {tokenizer.unk_token_id} if _has_template(tokenizer, template_kwargs) else ()
    for turn in turns:
        _, before = render(messages[:turn], tokenizer, template_kwargs)
        after = conversation_text(messages[: turn + 1], tokenizer, template_kwargs)
        if not before.startswith(text_so_far) or not after.startswith(before):
            raise UserError(
                f"the chat template changes earlier turns once turn {turn} follows, so what the model would "
                "see and what it would learn from differ: keep one assistant's turn per row"
            )
        between = (
            tokenizer.encode(before[len(text_so_far) :], add_special_tokens=False) if len(before) > len(text_so_far) else []
        )
        turn_ids = tokenizer.encode(after[len(before) :], add_special_tokens=False)
        # The model does not learn what the template writes after the end of a turn.
        end = end_of_turn(turn_ids, ends, tokenizer.eos_token_id, tokenizer.decode)
        if not end:
            turn_ids, end = [*turn_ids, tokenizer.eos_token_id], len(turn_ids) + 1
        rest += between + turn_ids
        loss_mask += [False] * len(between) + [True] * end + [False] * (len(turn_ids) - end)
        text_so_far = after
    last = len(loss_mask) - loss_mask[::-1].index(True)
    return prompt, token_ids, text, [DatasetResponse(rest[:last], loss_mask[:last], str(messages[turns[-1]]["content"]))]


def last_turn(
    messages: Messages, tokenizer: Any, template_kwargs: dict[str, Any] | None = None
) -> tuple[Messages, list[int], str, list[DatasetResponse]]:
    """Split a conversation whose last turn is learned, including everything that the template writes after it."""
    if messages[-1]["role"] != "assistant":
        raise UserError(f"the last turn is to be learned, and is the {messages[-1]['role']}'s")
    prompt = messages[:-1]
    token_ids, text = render(prompt, tokenizer, template_kwargs)
    whole_text = conversation_text(messages, tokenizer, template_kwargs)
    if not whole_text.startswith(text):
        raise UserError("the chat template changes earlier turns once the last one follows")
    rest = [int(token) for token in tokenizer.encode(whole_text[len(text) :], add_special_tokens=False)]
    if not _has_template(tokenizer, template_kwargs):
        rest.append(tokenizer.eos_token_id)
    return prompt, token_ids, text, [DatasetResponse(rest, [True] * len(rest), str(messages[-1]["content"]))]


def conversation_text(messages: Messages, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> str:
    """Return the text of a conversation that ends with an assistant turn."""
    if _has_template(tokenizer, template_kwargs):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **(template_kwargs or {})))
    return "\n".join(str(message["content"]) for message in messages)


def encode_conversation(messages: Messages, response: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a prompt with a response as the assistant turn, as a reward model reads them."""
    text = conversation_text([*messages, {"role": "assistant", "content": response}], tokenizer)
    templated = bool(getattr(tokenizer, "chat_template", None))
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=not templated)]


def render(messages: Messages, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> tuple[list[int], str]:
    """(tokens, text) of a prompt through the tokenizer's chat template, if it has one.

    Without a template, messages are joined by line breaks and one more line break ends the text.
    """
    if _has_template(tokenizer, template_kwargs):
        template = partial(
            tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, **(template_kwargs or {})
        )
        text = template(messages)
        check_kept(messages, text, template)
        # The template writes its own special tokens.
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        text = "\n".join(str(message["content"]) for message in messages) + "\n"
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise UserError(f"the prompt has no tokens: {messages!r}")
    return [int(token) for token in token_ids], text


def _has_template(tokenizer: Any, template_kwargs: dict[str, Any] | None) -> bool:
    return "chat_template" in (template_kwargs or {}) or bool(getattr(tokenizer, "chat_template", None))
