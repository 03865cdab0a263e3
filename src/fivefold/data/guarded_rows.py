"""Special tokens in the texts of rows: kept, escaped or refused, as `data.special_tokens` sets it. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from fivefold.data.rows import Row
from fivefold.errors import UserError
from fivefold.special_tokens import escape

SpecialTokens = Literal["keep", "escape", "refuse"]


def special_in(row: Row, pattern: re.Pattern[str] | None) -> str | None:
    """Return the first special token in the texts of a row; None without one."""
    matches = (pattern.search(text) for text in _texts(row)) if pattern is not None else ()
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
    messages = [
        {**message, "content": escape(message["content"], pattern)}
        if mode == "escape" or message["role"] == "tool"
        else message
        for message in row.messages
    ]
    responses = [escape(text, pattern) for text in row.responses] if mode == "escape" else row.responses
    return replace(row, messages=messages, responses=responses)


def _texts(row: Row) -> Iterable[str]:
    yield from (message["content"] for message in row.messages)
    yield from row.responses
