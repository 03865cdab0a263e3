"""Translate low-rank adapters of other systems to our section `lora` of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_dialects import shared
from fivefold_dialects.source import Source

MEGATRON_MODULES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "all": ("all-linear",),
}
"""Modules of Megatron-Core -> Hugging Face's names of the linear layers that each consists of."""
_OF_A_PATTERN = frozenset("*$|()[]^\\+?")


def modules(source: Source, key: str) -> list[str] | None:
    """Return the names of linear layers from a list or a text with commas; None if there are none or they form a pattern."""
    names = [name.strip() for text in source.texts(key) for name in text.split(",") if name.strip()]
    if any(_OF_A_PATTERN & set(name) for name in names):
        source.lacks(key, "a pattern of module names: name the linear layers, as q_proj, k_proj")
        return None
    return list(dict.fromkeys(ours for name in names for ours in MEGATRON_MODULES.get(name, (name,)))) or None


def adapters(
    source: Source, ours: str, *, rank: str, alpha: str, targets: str, exclude: str = "", path: str = "", init: str = ""
) -> dict[str, Any]:
    """Return our keys of the adapters of model `ours`; other arguments name the system's keys. Empty if the rank is 0."""
    number = source.whole(rank) or 0
    if number <= 0:
        return {}
    found: dict[str, Any] = {"rank": number, "alpha": source.number(alpha), "target_modules": modules(source, targets)}
    if exclude:
        found["exclude_modules"] = modules(source, exclude)
    if path:
        found["path"] = shared.path(source, path)
    if init and (how := source.text(init)) is not None:
        if how in ("kaiming", "xavier"):
            found["init"] = how
        else:
            source.lacks(init, "an initialization of A other than kaiming or xavier")
    return {f"{ours}.lora.{name}": value for name, value in found.items()}


def refuse(source: Source, key: str, reason: str, off: tuple[Any, ...]) -> None:
    """Report a key as not supported unless its value is null or one of `off`."""
    if source.has(key) and source.value(key) not in (None, [], {}, *off):
        source.lacks(key, reason)
