"""Tokens that end a response: if several files name some, those that transformers uses. No torch here."""

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


def _tokens(path: Path) -> frozenset[int]:
    """Read the end tokens in a file."""
    given: Any = read_json_object(path).get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"{path}: eos_token_id must be a token or a list of tokens: got {shown(given)}")
    return frozenset(ids)
