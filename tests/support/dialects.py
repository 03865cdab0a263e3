"""What tests of other systems' configurations share: the translation of words and YAML, and our configuration of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fivefold.config import RunConfig
from fivefold.config.dialect import Translation, find_dialect, find_system
from fivefold.config.loader import read_mapping

HOME = {"HOME": "/home/me"}


def translate_words(
    system: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    given: Mapping[str, str] = {},
    *,
    allow_secrets: bool = False,
) -> Translation:
    """Translate a command as `fivefold convert --from SYSTEM` or `--from SYSTEM@VERSION` does."""
    name, _, version = system.partition("@")
    given = {**environment, **given} if allow_secrets else given
    return find_system(name).translate_words(words, environment, given, version=version)


def translated(system: str, *words: str, tree: str = "") -> Translation:
    return find_dialect(system)(read_mapping(tree, "a file"), list(words), environment=HOME)  # type: ignore[call-arg]


def config(system: str, *words: str, tree: str = "") -> RunConfig:
    translation = translated(system, *words, tree=tree)
    assert translation.refusals == []
    return RunConfig.from_tree(translation.tree)
