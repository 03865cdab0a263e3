"""Low-rank adapters as other systems ask for them -> `lora` of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.dialects import shared
from fivefold.config.dialects.source import Source
from fivefold.config.dialects.table import Row, fixed, lacks, used

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
"""Modules of Megatron-Core -> the linear maps that each is made of, by their names in Hugging Face."""
_OF_A_PATTERN = frozenset("*$|()[]^\\+?")


def modules(source: Source, key: str) -> list[str] | None:
    """Linear maps by name, from a list or a text with commas; None where there are none or they are a pattern."""
    names = [name.strip() for text in source.texts(key) for name in text.split(",") if name.strip()]
    if any(_OF_A_PATTERN & set(name) for name in names):
        source.lacks(key, "a pattern of module names: name the linear maps, as q_proj, k_proj")
        return None
    return list(dict.fromkeys(ours for name in names for ours in MEGATRON_MODULES.get(name, (name,)))) or None


def adapters(
    source: Source, ours: str, *, rank: str, alpha: str, targets: str, exclude: str = "", path: str = "", init: str = ""
) -> dict[str, Any]:
    """Our keys of the adapters of a model `ours`, from the keys that have them there; nothing where the rank is 0."""
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
            source.lacks(init, "A that is drawn in another way than kaiming or xavier")
    return {f"{ours}.lora.{name}": value for name, value in found.items()}


def refuse(source: Source, key: str, reason: str, off: tuple[Any, ...]) -> None:
    """Say of a key that it is not supported, where it has another value than null or one of `off`."""
    if source.has(key) and source.value(key) not in (None, [], {}, *off):
        source.lacks(key, reason)


VERL_DEFAULTS: Mapping[str, Any] = {
    "lora_rank": 0,
    "lora_alpha": 16,
    "target_modules": "all-linear",
    "lora.rank": 0,
    "lora.alpha": 32,
    "lora.target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "lora.lora_A_init_method": "xavier",
}
"""verl's own, within the section of a model."""
_FSDP = "lora_rank lora_alpha target_modules exclude_modules lora_adapter_path"
_MEGATRON = "lora.rank lora.alpha lora.target_modules lora.exclude_modules lora.adapter_path lora.lora_A_init_method"


def of_verl(source: Source, start: str, ours: str, is_megatron: bool) -> dict[str, Any]:
    """The adapters of a model whose section is `start`: FSDP reads lora_rank and its neighbours, Megatron-Core lora.*."""
    roles = ("rank", "alpha", "targets", "exclude", "path", "init")
    names = (_MEGATRON if is_megatron else _FSDP).split()
    found = adapters(source, ours, **{role: start + name for role, name in zip(roles, names, strict=False)})
    if found and is_megatron:
        refuse(source, f"{start}lora.dropout", "dropout of adapters", (0, 0.0))
        refuse(source, f"{start}lora.type", "other adapters than LoRA", ("lora", "canonical_lora"))
        refuse(source, f"{start}lora.lora_B_init_method", "B that does not begin at 0", ("zero",))
    return found


def rows_of_verl(start: str, ours: str) -> list[Row]:
    """What becomes of the keys of a model's adapters."""
    modules_note = (
        "linear_qkv is q_proj, k_proj and v_proj, linear_fc1 gate_proj and up_proj: each has an A of its own here."
    )
    notes = ("", "Over the rank, the factor of B A.", modules_note, "", "Its r and lora_alpha must be those set here.", "")
    names = ("rank", "alpha", "target_modules", "exclude_modules", "path", "init")
    found: list[Row] = []
    for place, (name, note) in enumerate(zip(names, notes, strict=True)):
        theirs = [part.split()[place] for part in (_FSDP, _MEGATRON) if place < len(part.split())]
        found += used([start + key for key in theirs], f"{ours}.lora.{name}", note)
    refused = [f"{start}lora.{name}" for name in ("dropout", "type", "lora_B_init_method")]
    found += used(refused, f"{ours}.lora.rank", "Dropout, other adapters than LoRA and a B that is not 0 are refused.")
    found += lacks(f"{start}lora.dtype", "adapters of another type than the model's", ["bf16", "bfloat16"])
    found += fixed(f"{start}lora.freeze_vision_model {start}lora.freeze_vision_projection", "of models of images")
    found += lacks(f"{start}lora.freeze_language_model", "adapters next to weights that learn", [True])
    found += fixed(f"{start}lora.dropout_position", "read with dropout only")
    return found + fixed(
        f"{start}lora.merge {start}lora.a2a_experimental", "how adapters reach the engine: it is given the merged weights"
    )
