"""Translate low-rank adapters of other systems to our section `lora` of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_dialects.source import Source
from fivefold_dialects.table import fields, load

MEGATRON_MODULES: Mapping[str, str] = load("shared")["modules"]
_OF_A_PATTERN = frozenset("*$|()[]^\\+?")


def modules(source: Source, key: str) -> list[str] | None:
    """Return the names of linear layers from a list or a text with commas; None if there are none or they form a pattern."""
    names = [name.strip() for text in source.texts(key) for name in text.split(",") if name.strip()]
    if any(_OF_A_PATTERN & set(name) for name in names):
        source.lacks(key, "a pattern of module names: name the linear layers, as q_proj, k_proj")
        return None
    return list(dict.fromkeys(ours for name in names for ours in MEGATRON_MODULES.get(name, name).split())) or None


def _initialization(source: Source, key: str) -> str | None:
    """Return how A begins; report other names than kaiming and xavier."""
    if (name := source.text(key)) in (None, "kaiming", "xavier"):
        return name
    source.lacks(key, "an initialization of A other than kaiming or xavier")
    return None


def adapters(source: Source, ours: str, system: str, group: str = "adapters") -> dict[str, Any]:
    """Return our keys of the adapters of model `ours`, by a group of fields of the system; empty if it has no adapters."""
    found = fields(system, {"modules": modules, "initialization": _initialization})[group](source)
    return {f"{ours}.lora.{name}": value for name, value in found.items()}
