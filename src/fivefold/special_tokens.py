"""Finds and escapes special tokens in texts: a user's message that contains one could open another turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

USUAL = re.compile(
    r"<\|[^<>|\s]{1,64}\|>|<｜[^<>｜\s]{1,64}｜>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|\[/?SYSTEM_PROMPT\]"
)
"""Special tokens of published models, for a model whose tokenizer is not available."""


def special_pattern(tokens: Mapping[Any, Any]) -> re.Pattern[str] | None:
    """Return a pattern for the special tokens among a vocabulary's added tokens; None if there are none.

    Those of one letter are left out, since no space fits into them.
    """
    texts = sorted({str(token) for token in tokens.values() if token.special and len(str(token)) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


@lru_cache(8)
def pattern_of(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern for the special tokens of a transformers tokenizer."""
    return special_pattern(getattr(tokenizer, "added_tokens_decoder", {}))


def escape(text: str, pattern: re.Pattern[str] | None) -> str:
    """Insert a space after the first letter of each special token, so that it becomes plain text."""
    while pattern is not None and pattern.search(text):
        text = pattern.sub(lambda token: f"{token[0][0]} {token[0][1:]}", text)
    return text


def escape_all(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """Return a value of JSON in which every text is escaped, names of keys too: a message, or the schema of a tool."""
    if isinstance(value, str):
        return escape(value, pattern)
    if isinstance(value, Mapping):
        return {escape_all(key, pattern): escape_all(inner, pattern) for key, inner in value.items()}
    return [escape_all(inner, pattern) for inner in value] if isinstance(value, list) else value
