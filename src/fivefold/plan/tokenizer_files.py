"""Checks of a tokenizer's files before a run: they can be read, responses can end, and the model has every token."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.data.light_tokenizer import OTHER_FILES, LightTokenizer
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.models.end_tokens import EndTokens, PadTokens
from fivefold.models.spec import ModelSpec


def check_tokenizer(findings: Findings, config: RunConfig, spec: ModelSpec | None) -> LightTokenizer | None:
    """Report errors of the policy's tokenizer; return it if its files are here and can be read without transformers."""
    key, path = _key(config), config.model.tokenizer_path
    directory = Path(path)
    if not directory.is_dir():
        if config.model.tokenizer and not is_hub_id(path):
            findings.error(key, f": no directory {path}, and no hub id, which is written owner/name")
        return None
    tokenizer = check_tokenizer_files(findings, key, directory, spec)
    if tokenizer is not None:
        try:
            _check_ends(findings, key, config, tokenizer, spec)
        except UserError as error:
            findings.error(key, f": {error}")
    return tokenizer


def _key(config: RunConfig) -> str:
    """Return the key that names the tokenizer's directory."""
    return next((f"model.{name}" for name in ("tokenizer", "config") if getattr(config.model, name)), "model.path")


def check_learned_ends(findings: Findings, config: RunConfig, tokenizer: LightTokenizer, learned: Collection[int]) -> None:
    """Report tokens that end what is learned but no sampled response, and those that are pad tokens."""
    key, directory, drawn = _key(config), Path(config.model.described_by(config.model.path)), config.engine.sampling
    pads, ends = PadTokens.of(directory, tokenizer.pad_token_id), EndTokens.of(directory, tokenizer.eos_token_id).used
    for token in learned:
        if message := pads.learned(token):
            findings.note(f"{key}: {message}")
        if drawn.ignore_eos or token in {*ends, *drawn.stop_token_ids}:
            continue
        if token == tokenizer.eos_token_id:
            findings.error(
                key,
                f": every response to learn ends with token {token}, the tokenizer's eos_token, which ends no sampled one "
                f"({sorted(ends)} do): a model that learns it would never stop. Name one of them as eos_token in "
                "tokenizer_config.json, or add it to engine.sampling.stop_token_ids",
            )
        else:
            findings.note(
                f"{key}: turns to learn end with {tokenizer.backend.id_to_token(token)} of the chat template, token "
                f"{token}, which ends no sampled response ({sorted(ends)} do): a model that learns it continues after its "
                "turn; add it to engine.sampling.stop_token_ids, and to eos_token_id in generation_config.json"
            )


def check_tokenizer_files(findings: Findings, key: str, directory: Path, spec: ModelSpec | None) -> LightTokenizer | None:
    """Report errors of the tokenizer in a directory; return it if it can be read without transformers."""
    if not (directory / "tokenizer.json").is_file():
        if not any((directory / name).is_file() for name in OTHER_FILES):
            findings.error(key, f": no tokenizer in {directory}; name one in model.tokenizer")
        return None
    try:
        tokenizer = LightTokenizer.load(directory)
    except UserError as error:
        findings.error(key, f": {error}")
        return None
    if spec is not None and (highest := tokenizer.highest_id(with_added=False)) >= spec.vocab:
        findings.error(
            key,
            f": the tokenizer has tokens up to {highest}, the model knows {spec.vocab}: they do not belong together",
        )
    elif spec is not None and (highest := tokenizer.highest_id(with_added=True)) >= spec.vocab:
        findings.note(f"the tokenizer in {directory} adds tokens up to {highest} to the model's vocabulary of {spec.vocab}")
    return tokenizer


def is_hub_id(path: str) -> bool:
    """Return whether the path may name a hub repository: owner/name, with @revision for another than the latest."""
    name = path.partition("@")[0]
    return not name.startswith((".", "/", "~")) and name.count("/") == 1 and all(name.split("/"))


def _check_ends(findings: Findings, key: str, config: RunConfig, tokenizer: LightTokenizer, spec: ModelSpec | None) -> None:
    directory = Path(config.model.described_by(config.model.path))
    tokens, pads = EndTokens.of(directory, tokenizer.eos_token_id), PadTokens.of(directory, tokenizer.pad_token_id)
    ends = tokens.used
    learned = None if config.algorithm.offline else tokenizer.eos_token_id if len(ends) != 1 else min(ends)
    for message in filter(None, (pads.contradiction, pads.learned(learned))):
        findings.note(f"{key}: {message}")
    if tokens.contradiction and not config.engine.sampling.ignore_eos:
        findings.note(f"{key}: {tokens.contradiction}")
    drawn = config.engine.sampling
    if config.algorithm.offline and tokenizer.eos_token_id is None:
        findings.error(
            key,
            ": the tokenizer has no eos_token, with which every response to learn ends: name one in tokenizer_config.json",
        )
    elif not ends and not (drawn.stop or drawn.stop_token_ids or drawn.ignore_eos):
        findings.error(
            key,
            ": neither the tokenizer nor the model has an end token, so no response would ever end: name eos_token in "
            "tokenizer_config.json, or engine.sampling.stop_token_ids",
        )
    outside = sorted(token for token in ends if spec is not None and not 0 <= token < spec.vocab)
    if outside and spec is not None:
        findings.error(key, f": the end token {outside[0]} is not in the model's vocabulary of {spec.vocab}")
