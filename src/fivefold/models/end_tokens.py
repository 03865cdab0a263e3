"""Tokens that end or pad a text: if several files name some, those that transformers uses. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.files import read_json_object

_FILES = ("generation_config.json", "config.json")
"""Files that name end tokens, in transformers' order of precedence."""


@dataclass(frozen=True)
class EndTokens:
    """End tokens by source, in order of precedence."""

    named: dict[str, frozenset[int]]

    @classmethod
    def of(cls, directory: Path, tokenizer: int | None) -> EndTokens:
        """Read the end tokens of a model's directory and its tokenizer; raises ValueError if they are not tokens."""
        named = {name: _tokens(directory / name) for name in _FILES if (directory / name).is_file()}
        named["the tokenizer"] = frozenset() if tokenizer is None else frozenset([tokenizer])
        return cls({source: tokens for source, tokens in named.items() if tokens})

    @property
    def used(self) -> frozenset[int]:
        """Tokens that end a response."""
        return next(iter(self.named.values()), frozenset())

    @property
    def contradiction(self) -> str:
        """Message about the tokens in use if sources disagree; otherwise empty."""
        if len(set(self.named.values())) < 2:
            return ""
        (source, used), *others = self.named.items()
        rest = ", ".join(f"{name} {sorted(tokens)}" for name, tokens in others if tokens != used)
        return (
            f"responses end with {sorted(used)} of {source}, as with transformers, and not by {rest}; "
            "engine.sampling.stop_token_ids adds tokens"
        )


@dataclass(frozen=True)
class PadTokens:
    """Pad tokens by source: those with which transformers fills up finished responses first.

    A run uses none of them, because samples are packed. A reward model is the exception: transformers scores a text at its
    last token that is not the pad token of config.json.
    """

    named: dict[str, int]

    @classmethod
    def of(cls, directory: Path, tokenizer: int | None) -> PadTokens:
        """Read the pad tokens of a model's directory and its tokenizer; raises ValueError if they are not tokens."""
        named = {name: token for name in _FILES if (token := pad_token(directory / name)) is not None}
        return cls(named if tokenizer is None else {**named, "the tokenizer": tokenizer})

    @property
    def contradiction(self) -> str:
        """Message about sources that disagree; otherwise empty."""
        if len(set(self.named.values())) < 2:
            return ""
        named = ", ".join(f"{token} of {source}" for source, token in self.named.items())
        used = "the first of them fills up finished responses"
        if "the tokenizer" in self.named:
            used = "the tokenizer's fills up prompts, the first of them finished responses"
        return f"pad tokens differ: {named}; none is used, because samples are packed (in transformers {used})"

    def learned(self, end: int | None) -> str:
        """Message if a pad token is `end`, the token that ends responses to learn; otherwise empty."""
        sources = [source for source, token in self.named.items() if token == end]
        if not sources:
            return ""
        # Models of transformers read the pad token of config.json alone.
        embedding = ", and models the gradient of its embedding as an input" if "config.json" in sources else ""
        return (
            f"token {end} ends responses and is also the pad token of {' and '.join(sources)}: the policy learns to "
            f"end with it, since samples are packed; transformers' collators would leave it out of the loss{embedding}"
        )


def pad_token(path: Path) -> int | None:
    """Return the pad token that a JSON file names; None if it names none or is missing."""
    token = read_json_object(path).get("pad_token_id") if path.is_file() else None
    if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
        raise UserError(f"{path}: pad_token_id must be a token: got {shown(token)}")
    return token


def _tokens(path: Path) -> frozenset[int]:
    """Read the end tokens in a file."""
    value: Any = read_json_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"{path}: eos_token_id must be a token or a list of tokens: got {shown(value)}")
    return frozenset(ids)
