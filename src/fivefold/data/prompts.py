"""Parquet and jsonl rows -> tokenized prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fivefold.config.methods import LearnsFrom
from fivefold.types import DatasetResponse, Prompt


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]
    dropped: int
    """Rows left out because their prompt is longer than allowed."""


@dataclass(frozen=True)
class Columns:
    """Where a row keeps what."""

    prompt: str = "prompt"
    response: str = "response"
    messages: str = "messages"
    chosen: str = "chosen"
    rejected: str = "rejected"


def load_prompts(
    files: Sequence[str],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    overlong: Literal["drop", "refuse"],
    columns: Columns = Columns(),
    learns_from: LearnsFrom = "rollouts",
    need_responses: bool = False,
    max_response_tokens: int = 0,
    first: int | None = None,
) -> PromptSet:
    """Rows of all files in order, numbered from 0; `first` takes only so many of each file.

    To learn from responses or pairs, prompts carry those of their row, cut off at `max_response_tokens`: the one to imitate,
    or the chosen and the rejected one. Raises ValueError for a file or row that cannot be used, naming it.
    """
    prompts: list[Prompt] = []
    dropped = number = 0
    for name in files:
        for place, row in enumerate(read_rows(Path(name))):
            if first is not None and place >= first:
                break
            where = f"{name}, row {place}"
            try:
                messages, token_ids, text, responses = _read(row, tokenizer, columns, learns_from)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if need_responses and not responses:
                wanted = {
                    "responses": f"a text in column {columns.response!r} or a conversation in column {columns.messages!r}",
                    "pairs": f"columns {columns.chosen!r} and {columns.rejected!r}",
                }[learns_from]
                raise ValueError(
                    f"{where}: learning from {learns_from} needs {wanted}; it has {', '.join(row)}; data.*_key name others"
                )
            number += 1
            if len(token_ids) > max_prompt_tokens:
                if overlong == "refuse":
                    raise ValueError(
                        f"{where}: the prompt has {len(token_ids)} tokens, data.max_prompt_tokens is {max_prompt_tokens}; "
                        "raise it, or set data.overlong_prompts to drop"
                    )
                dropped += 1
                continue
            prompts.append(
                Prompt(
                    id=number - 1,
                    token_ids=token_ids,
                    source=str(row.get("data_source", Path(name).stem)),
                    text=text,
                    ground_truth=str((row.get("reward_model") or {}).get("ground_truth", "")),
                    messages=messages,
                    responses=[_truncate(response, max_response_tokens) for response in responses],
                    extra=dict(row.get("extra_info") or {}),
                )
            )
    if not prompts:
        raise ValueError(f"no prompts left in {', '.join(files)}: {dropped} were longer than {max_prompt_tokens} tokens")
    return PromptSet(prompts, dropped)


Messages = list[dict[str, Any]]


def _read(
    row: dict[str, Any], tokenizer: Any, columns: Columns, learns_from: LearnsFrom
) -> tuple[Messages, list[int], str, list[DatasetResponse]]:
    """(messages, tokens and text of the prompt, responses to learn from)."""
    if learns_from == "responses" and row.get(columns.messages) is not None:
        return conversation(as_messages(row[columns.messages]), tokenizer)
    pair = [row.get(columns.chosen), row.get(columns.rejected)] if learns_from == "pairs" else []
    if row.get(columns.prompt) is not None:
        messages = as_messages(row[columns.prompt])
    elif pair and all(isinstance(side, list) and len(side) > 1 for side in pair):
        chosen, rejected = (as_messages(side) for side in pair)
        if chosen[:-1] != rejected[:-1]:
            raise ValueError(f"{columns.chosen!r} and {columns.rejected!r} must differ in their last turn only")
        messages = chosen[:-1]
    else:
        raise ValueError(f"no column {columns.prompt!r}; it has {', '.join(row)}; set data.prompt_key")
    token_ids, text = render(messages, tokenizer)
    texts = [row.get(columns.response)] if learns_from == "responses" else pair
    texts_found = [str(as_messages(one)[-1]["content"]) if isinstance(one, list) else one for one in texts]
    responses = [_response(one, tokenizer) for one in texts_found if isinstance(one, str)]
    return messages, token_ids, text, responses if len(responses) == len(texts_found) else []


def _response(text: str, tokenizer: Any) -> DatasetResponse:
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return DatasetResponse(token_ids, [True] * len(token_ids), text)


def _truncate(given: DatasetResponse, limit: int) -> DatasetResponse:
    if len(given.token_ids) <= limit:
        return given
    return DatasetResponse(given.token_ids[:limit], given.loss_mask[:limit], given.text, truncated=True)


def conversation(messages: Messages, tokenizer: Any) -> tuple[Messages, list[int], str, list[DatasetResponse]]:
    """A conversation whose assistant's turns are learned: (messages before the first, their tokens, text, the rest)."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise ValueError("a conversation to imitate needs an assistant's turn behind another one")
    prompt = messages[: turns[0]]
    token_ids, text = render(prompt, tokenizer)
    rest: list[int] = []
    loss_mask: list[bool] = []
    said = text
    for turn in turns:
        _, before = render(messages[:turn], tokenizer)
        after = conversation_text(messages[: turn + 1], tokenizer)
        if not before.startswith(said) or not after.startswith(before):
            raise ValueError(
                f"the chat template writes earlier turns in another way once turn {turn} follows, so what the model would "
                "see and what it would learn from differ: keep one assistant's turn a row"
            )
        between = tokenizer.encode(before[len(said) :], add_special_tokens=False) if len(before) > len(said) else []
        own = tokenizer.encode(after[len(before) :], add_special_tokens=False)
        if tokenizer.eos_token_id in own:
            # What the template writes behind the end of a turn is not the model's to say.
            end = len(own) - own[::-1].index(tokenizer.eos_token_id)
        else:
            own, end = [*own, tokenizer.eos_token_id], len(own) + 1
        rest += between + own
        loss_mask += [False] * len(between) + [True] * end + [False] * (len(own) - end)
        said = after
    last = len(loss_mask) - loss_mask[::-1].index(True)
    return prompt, token_ids, text, [DatasetResponse(rest[:last], loss_mask[:last], str(messages[turns[-1]]["content"]))]


def conversation_text(messages: Messages, tokenizer: Any) -> str:
    """The text of a conversation that ends with an assistant's turn."""
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n".join(str(message["content"]) for message in messages)


def encode_conversation(messages: Messages, response: str, tokenizer: Any) -> list[int]:
    """The tokens of a prompt's messages with a response as the assistant's turn: what a reward model reads."""
    text = conversation_text([*messages, {"role": "assistant", "content": response}], tokenizer)
    templated = bool(getattr(tokenizer, "chat_template", None))
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=not templated)]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet or jsonl file."""
    if not path.is_file():
        raise ValueError(f"no data file at {path}")
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    elif path.suffix in (".jsonl", ".json"):
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
                    if not isinstance(row, dict):
                        raise ValueError(f"{path}, line {number} must be an object")
                    yield row
    else:
        raise ValueError(f"{path}: data files end in .parquet or .jsonl")


def as_messages(prompt: Any) -> Messages:
    """Messages of a text or of messages; raises ValueError for anything else."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt):
        return prompt
    raise ValueError(f"a prompt is a text or a list of messages with role and content, got {prompt!r}")


def render(messages: Messages, tokenizer: Any) -> tuple[list[int], str]:
    """(tokens, text) of a prompt through the tokenizer's chat template where it has one.

    Without a template messages are joined by line breaks and the text is followed by one more.
    """
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes its own special tokens.
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        text = "\n".join(str(message["content"]) for message in messages) + "\n"
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise ValueError(f"the prompt has no tokens: {messages!r}")
    return [int(token) for token in token_ids], text
