"""Parquet and jsonl rows -> tokenized prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fivefold.types import Prompt


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]
    dropped: int
    """Rows left out because their prompt is longer than allowed."""


def load_prompts(
    files: Sequence[str],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    overlong: Literal["drop", "refuse"],
    prompt_key: str = "prompt",
    response_key: str = "response",
    need_response: bool = False,
    first: int | None = None,
) -> PromptSet:
    """Rows of all files in order, numbered from 0; `first` takes only so many of each file.

    Raises ValueError for a file or row that cannot be used, naming it.
    """
    prompts: list[Prompt] = []
    dropped = number = 0
    for name in files:
        for place, row in enumerate(read_rows(Path(name))):
            if first is not None and place >= first:
                break
            where = f"{name}, row {place}"
            if prompt_key not in row:
                raise ValueError(f"{where}: no column {prompt_key!r}; it has {', '.join(row)}; set data.prompt_key")
            response = row.get(response_key)
            if need_response and not isinstance(response, str):
                raise ValueError(f"{where}: sft needs a text in column {response_key!r}; set data.response_key")
            token_ids, text = render(row[prompt_key], tokenizer, where)
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
                    response=response,
                    extra=dict(row.get("extra_info") or {}),
                )
            )
    if not prompts:
        raise ValueError(f"no prompts left in {', '.join(files)}: {dropped} were longer than {max_prompt_tokens} tokens")
    return PromptSet(prompts, dropped)


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


def render(prompt: Any, tokenizer: Any, where: str) -> tuple[list[int], str]:
    """(tokens, text) of messages or of plain text, through the tokenizer's chat template where it has one.

    Without a template messages are joined by line breaks and the text is followed by one more.
    """
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt):
        messages = prompt
    else:
        raise ValueError(f"{where}: a prompt is a text or a list of messages with role and content, got {prompt!r}")
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes its own special tokens.
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        text = "\n".join(str(message["content"]) for message in messages) + "\n"
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise ValueError(f"{where}: the prompt has no tokens: {prompt!r}")
    return [int(token) for token in token_ids], text
