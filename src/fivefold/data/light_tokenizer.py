"""Reads a tokenizer's files without transformers and torch, so that `check` sees what training will read.

It encodes like the fast tokenizer of transformers, and renders chat templates in the same sandbox with the same names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fivefold.data.bounded_template import BoundedTemplate
from fivefold.errors import UserError, first_line, shown
from fivefold.files import read_json_object, read_text
from fivefold.special_tokens import end_of_turn, special_pattern, special_tokens

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model", "tekken.json")
"""Files of tokenizers that only transformers can read."""


@dataclass(frozen=True)
class LightTokenizer:
    """The parts of a transformers tokenizer that process prompts; raises ValueError if its files cannot be used."""

    directory: Path
    backend: Any
    """The tokenizer as a tokenizers.Tokenizer."""
    special: dict[str, str] = field(default_factory=dict)
    """Name (eos_token, ...) -> text of the special token."""
    template: BoundedTemplate | None = None
    """Compiled chat template; None without one."""

    @classmethod
    def load(cls, directory: Path) -> LightTokenizer:
        import tokenizers

        path = directory / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises plain Exception for all its errors.
            raise UserError(
                f"{path} is not a tokenizer that the tokenizers library can read: {first_line(error)}"
            ) from error
        config: dict[str, Any] = {}
        special: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (file := directory / name).is_file():
                config = read_json_object(file)
                special |= {key: _token_text(config[key], key, file) for key in _SPECIAL if config.get(key) is not None}
        # transformers adds the special tokens that the vocabulary lacks.
        backend.add_special_tokens([text for text in special.values() if backend.token_to_id(text) is None])
        text = _chat_template(directory, config)
        return cls(directory, backend, special, _compile(text, str(directory)) if text else None)

    def with_template(self, text: str, where: str) -> LightTokenizer:
        """Return this tokenizer with another chat template; raises ValueError if it is not a valid template."""
        return replace(self, template=_compile(text, where))

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Pattern that matches the tokenizer's special tokens in a text."""
        return special_pattern(self.backend.get_added_tokens_decoder())

    @cached_property
    def special_ids(self) -> frozenset[int | None]:
        """The tokenizer's special tokens, without the one for unknown letters."""
        return frozenset(special_tokens(self.backend.get_added_tokens_decoder())) - {self._special_id("unk_token")}

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    def _special_id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.special[name]) if name in self.special else None

    def highest_id(self, with_added: bool) -> int:
        """Return the highest token id of the vocabulary, with or without added tokens."""
        return max(self.backend.get_vocab(with_added_tokens=with_added).values(), default=-1)

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, kwargs: dict[str, Any] | None = None
    ) -> str:
        """Return the text of a prompt, as data/prompts.py renders it; `kwargs` are variables of the template."""
        if self.template is not None:
            return self.apply_chat_template(messages, add_generation_prompt, kwargs or {})
        end = "\n" if add_generation_prompt else ""
        return "\n".join(str(message["content"]) for message in messages) + end

    def turn_end(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> int | None:
        """Return the token that ends the last turn of a conversation, as data/prompts.py learns it."""
        turn = self.render(messages, False, kwargs)[len(self.render(messages[:-1], True, kwargs)) :]
        token_ids = self.backend.encode(turn, add_special_tokens=False).ids
        ends = () if self.template is None else self.special_ids
        end = end_of_turn(token_ids, ends, self.eos_token_id, self.backend.decode)
        return token_ids[end - 1] if end else self.eos_token_id

    def check_text(self, text: str) -> list[int]:
        """Return the tokens of a text without surrounding special tokens; raises ValueError if a character has no token."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        covered = bytearray(len(text))
        for begin, end in encoding.offsets:
            covered[begin:end] = b"\1" * (end - begin)
        lost = set()
        if 0 in covered:
            lost = {letter for letter, seen in zip(text, covered, strict=True) if not seen and not letter.isspace()}
        if lost:
            raise UserError(
                f"the tokenizer in {self.directory} has no token for {shown(''.join(sorted(lost)), 40)} and leaves it out: "
                "the model would read another text"
            )
        return list(encoding.ids)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]
    ) -> str:
        """Return the text of a conversation; raises ValueError if the template raises an error."""
        assert self.template is not None
        try:
            return self.template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.special, **kwargs},
            )
        except (ValueError, RecursionError) as error:
            raise UserError(f"the chat template of {self.directory} raises: {first_line(error)}") from error


def _compile(text: str, where: str) -> BoundedTemplate:
    try:
        return BoundedTemplate(text)
    except ValueError as error:
        raise UserError(f"the chat template of {where} is not valid: {error}") from error


def _token_text(value: Any, name: str, path: Path) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f"{path}: {name} must be a text: got {shown(value)}")
    return text


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template from its own file, otherwise from the configuration; of several, the one named default."""
    if (path := directory / "chat_template.jinja").is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UserError(f"{directory / 'tokenizer_config.json'}: chat_template must be a text: got {shown(template)}")
    return template
