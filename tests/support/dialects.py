"""What tests of other systems' configurations share: the translation of words and YAML, and our configuration of it."""

from __future__ import annotations

from fivefold.config import RunConfig, make_config
from fivefold.config.dialects import Translation, find_dialect
from fivefold.config.loader import read_mapping

HOME = {"HOME": "/home/me"}


def translated(system: str, *words: str, tree: str = "") -> Translation:
    return find_dialect(system)(read_mapping(tree, "a file"), list(words), environment=HOME)  # type: ignore[call-arg]


def config(system: str, *words: str, tree: str = "") -> RunConfig:
    found = translated(system, *words, tree=tree)
    assert found.refusals == []
    return make_config(found.tree)
