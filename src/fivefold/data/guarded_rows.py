"""Special tokens in the texts of rows: kept, escaped or refused, as `data.special_tokens` sets it. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from fivefold.data.rows import Row
from fivefold.errors import UserError
from fivefold.special_tokens import escape_all, texts_in

SpecialTokens = Literal["keep", "escape", "refuse"]


def special_in(row: Row, pattern: re.Pattern[str] | None) -> str | None:
    """Return the first special token in the texts of a row that a chat template may write; None without one."""
    if pattern is None:
        return None
    with _bounded_levels():
        matches = map(pattern.search, texts_in([row.messages, row.responses, row.tools]))
        return next((match[0] for match in matches if match is not None), None)


def guard(row: Row, mode: SpecialTokens, pattern: re.Pattern[str] | None) -> Row:
    """Apply `data.special_tokens` to a row; special tokens in tool messages are always escaped.

    Raises ValueError if they are refused.
    """
    if (token := special_in(row, pattern)) is None:
        return row
    if mode == "refuse":
        raise UserError(
            f"a text holds the special token {token}, which data.special_tokens refuses: set it to escape, or remove it"
        )
    with _bounded_levels():
        if mode == "escape":
            messages, responses, tools = (escape_all(part, pattern) for part in (row.messages, row.responses, row.tools))
            return replace(row, messages=messages, responses=responses, tools=tools)
        messages = [escape_all(message, pattern) if message["role"] == "tool" else message for message in row.messages]
        return replace(row, messages=messages)


@contextmanager
def _bounded_levels() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise UserError("the messages and tools of a row must have at most some hundred levels") from None
