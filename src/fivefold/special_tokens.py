"""Finds and escapes special tokens in texts: a user's message that contains one could open another turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

USUAL = re.compile(
    r"<\|[^<>|\s]{1,64}\|>|<｜[^<>｜\s]{1,64}｜>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|\[/?SYSTEM_PROMPT\]"
)
"""Special tokens of published models, for a model whose tokenizer is not available."""


_ROLE = re.compile(r"\W+(?:system|developer|user|human|assistant|bot|model|turn)\W+", re.IGNORECASE)


def special_tokens(tokens: Mapping[int, Any]) -> dict[int, str]:
    """Return id -> text of those among a vocabulary's added tokens that are special.

    Some models (DeepSeek) mark the tokens that open turns as ordinary ones: what looks like a special token counts too.
    Marks of thoughts and calls, as `<think>`, do not: they open no turn, and responses to learn from hold them.
    """
    texts = {number: str(token) for number, token in tokens.items()}
    return {
        number: text
        for number, text in texts.items()
        if tokens[number].special or USUAL.fullmatch(text) or _ROLE.fullmatch(text)
    }


def special_pattern(tokens: Mapping[int, Any]) -> re.Pattern[str] | None:
    """Return a pattern for the special tokens among a vocabulary's added tokens; None if there are none.

    Those of one letter are left out, since no space fits into them.
    """
    texts = sorted({text for text in special_tokens(tokens).values() if len(text) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


@lru_cache(8)
def pattern_of(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern for the special tokens of a transformers tokenizer."""
    return special_pattern(getattr(tokenizer, "added_tokens_decoder", {}))


@lru_cache(8)
def special_ids_of(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens of a transformers tokenizer."""
    return frozenset(special_tokens(getattr(tokenizer, "added_tokens_decoder", {})))


def end_of_turn(
    token_ids: Sequence[int], special: Collection[int | None], eos: int | None, decode: Callable[[list[int]], str]
) -> int:
    """Return the number of tokens of a turn up to the token that ends it: 0 if its template writes none.

    It is the last special token that only blank text and special tokens follow, `eos` if that is one of them.
    """
    after: list[int] = []
    for place in reversed(range(len(token_ids))):
        if token_ids[place] == eos or token_ids[place] in special:
            after.append(place)
        elif decode([token_ids[place]]).strip():
            break
    every_eos = [place for place in reversed(range(len(token_ids))) if token_ids[place] == eos]
    ends = [place for place in after if token_ids[place] == eos] or after or every_eos
    return ends[0] + 1 if ends else 0


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text of a value of JSON, names of keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


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
