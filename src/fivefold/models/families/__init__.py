"""The model families, one file each: `config.json` -> ModelSpec -> its parameters. No torch here.

A new family is a new file here: a module whose `FAMILY` has its name, its reader and its table.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.errors import shown
from fivefold.models.config_json import check_types, read_config
from fivefold.models.config_keys import RecordedKeys, check_keys, unknown_keys
from fivefold.models.family import Family
from fivefold.models.parameters import MappedParameter, expand, expand_mtp
from fivefold.models.spec import ModelSpec


def find_families() -> dict[str, Family]:
    """The `FAMILY` of every file of this package, by name."""
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    return {module.FAMILY.name: module.FAMILY for module in modules}


FAMILIES = find_families()


def load_spec(directory: str | Path, value_head: bool = False) -> ModelSpec:
    """ModelSpec of a Hugging Face model directory; raises ValueError for what is not supported, by its name.

    With `value_head` the model ends in a value head, whatever the directory's own model ends in.
    """
    spec = spec_from_config(read_config(Path(directory)))
    return replace(spec, value_head=True, tied=False) if value_head else spec


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a parsed `config.json`; both transformers 4 and 5 spellings of RoPE are read."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"unknown model family {shown(family)} (model_type in config.json); supported: {', '.join(FAMILIES)}"
        )
    check_types(config)
    return _read(family, config)[0]


def unread_keys(directory: str | Path) -> list[str]:
    """Keys of the `config.json` of a model that change nothing, and have no known reason for that."""
    config = read_config(Path(directory))
    return sorted(unknown_keys(_read(config["model_type"], config)[1]))


def _read(family: str, config: dict[str, Any]) -> tuple[ModelSpec, RecordedKeys]:
    keys = RecordedKeys(config)
    spec = FAMILIES[family].read(keys)
    check_keys(config, spec)
    return spec, keys


def parameters_of(spec: ModelSpec) -> list[MappedParameter]:
    """Every parameter of the model in order of layers; those of multi-token prediction are not among them."""
    return expand(FAMILIES[spec.family].table(spec), spec)


def mtp_parameters_of(spec: ModelSpec) -> list[MappedParameter]:
    """Every parameter of the layers of multi-token prediction but what they share with the model."""
    family = FAMILIES[spec.family]
    return expand_mtp(family.table(spec), family.mtp, spec)


def is_of_mtp(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor of the files belongs to a layer of multi-token prediction."""
    names = FAMILIES[spec.family].mtp
    return name.startswith(tuple(names.start(spec, depth) for depth in range(spec.mtp_layers)))


def mtp_copies(spec: ModelSpec) -> dict[str, str]:
    """Name of a tensor that a layer of multi-token prediction shares with the model -> its name there."""
    names = FAMILIES[spec.family].mtp
    return {names.start(spec, depth) + own: whole for depth in range(spec.mtp_layers) for own, whole in names.copies}
