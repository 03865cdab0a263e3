"""The model families, one file each: `config.json` -> ModelSpec -> parameters. No torch here.

A new family is a new file here: a module whose `FAMILY` has its name, its reader and its table.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.models.bridged import as_bridged, for_fsdp_only
from fivefold.models.config_json import read_config
from fivefold.models.config_keys import RecordedKeys, check_keys, unknown_keys
from fivefold.models.family import Family
from fivefold.models.headers import is_stored
from fivefold.models.other_family import read_other
from fivefold.models.parameters import OUTPUT, MappedParameter, Sharding, expand, expand_mtp
from fivefold.models.spec import ModelSpec
from fivefold.models.transformers_config import check_as_transformers


def find_families() -> dict[str, Family]:
    """Return the `FAMILY` of every file in this package, by name."""
    modules = (importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__))
    return {module.FAMILY.name: module.FAMILY for module in modules}


FAMILIES = find_families()


def load_spec(directory: str | Path, value_head: bool = False) -> ModelSpec:
    """Load the ModelSpec of a Hugging Face model directory; raises ValueError with the name of anything unsupported.

    A model of another family is described by its files. With `value_head` the model ends in a value head, regardless of the
    directory's own model.
    """
    config = read_config(Path(directory))
    family = config.get("model_type")
    if isinstance(family, str) and family not in FAMILIES and is_stored(Path(directory)):
        spec = as_bridged(read_other(config, Path(directory)), config)
        check_as_transformers(config, family)
    else:
        spec = spec_from_config(config)
    if not value_head:
        return spec
    if spec.stored is not None:
        spec = for_fsdp_only(spec, f"a value head on {spec.family}, which has no file here, needs an fsdp: layout")
    return replace(spec, value_head=True, tied=False)


def runs_own_code(directory: str | Path, trusted: bool) -> bool:
    """Whether transformers runs the code of a model's repository: if it is trusted, and the family has no file here."""
    return trusted and read_config(Path(directory)).get("model_type") not in FAMILIES


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a parsed `config.json`; accepts the RoPE spellings of transformers 4 and 5."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"unknown model family {shown(family)} (model_type in config.json); supported: {', '.join(FAMILIES)}"
        )
    spec = _read(family, config)[0]
    check_as_transformers(config, (known_as(spec) or (family,))[0])
    return spec


def unread_keys(directory: str | Path) -> list[str]:
    """Return keys of a model's `config.json` that have no effect, without a known reason."""
    config = read_config(Path(directory))
    if config.get("model_type") not in FAMILIES:
        return []
    return sorted(unknown_keys(_read(config["model_type"], config)[1]))


def _read(family: str, config: dict[str, Any]) -> tuple[ModelSpec, RecordedKeys]:
    keys = RecordedKeys(config)
    spec = FAMILIES[family].read(keys)
    check_keys(config, spec)
    return spec, keys


def parameters_of(spec: ModelSpec) -> list[MappedParameter]:
    """Return every parameter of the model in order of layers, without those of multi-token prediction."""
    if spec.stored is not None:
        left_out = set(OUTPUT.hf) if spec.tied or spec.value_head else set()
        names = [name for name, _ in spec.stored.tensors if name not in left_out]
        return [MappedParameter(name, (name,), Sharding.REPLICATE, name) for name in names]
    return expand(FAMILIES[spec.family].table(spec), spec)


def mtp_parameters_of(spec: ModelSpec) -> list[MappedParameter]:
    """Return every parameter of the multi-token prediction layers except those shared with the model."""
    family = FAMILIES[spec.family]
    return expand_mtp(family.table(spec), family.mtp, spec)


def is_of_mtp(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor in the files belongs to a multi-token prediction layer."""
    if not spec.mtp_layers:
        return False
    names = FAMILIES[spec.family].mtp
    return name.startswith(tuple(names.start(spec, depth) for depth in range(spec.mtp_layers)))


def known_as(spec: ModelSpec) -> tuple[str, str] | None:
    """Return (`model_type`, architecture) under which engines compute the model, if they have no name for it."""
    return None if spec.stored is not None else FAMILIES[spec.family].known_as


def mtp_copies(spec: ModelSpec) -> dict[str, str]:
    """Return the name of each tensor that a multi-token prediction layer shares with the model -> its name there."""
    if not spec.mtp_layers:
        return {}
    names = FAMILIES[spec.family].mtp
    return {
        names.start(spec, depth) + ending: original for depth in range(spec.mtp_layers) for ending, original in names.copies
    }
