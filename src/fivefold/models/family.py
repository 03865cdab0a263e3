"""The definition of a model family, one per file under `families/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fivefold.models.parameters import MTP_BEHIND, MTPNames, Table
from fivefold.models.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """Models that share one format of `config.json` and one naming scheme for parameters."""

    name: str
    """`model_type` in config.json; the file has the same name."""
    read: Callable[[dict[str, Any]], ModelSpec]
    """Parsed `config.json` -> spec; raises ValueError with the key of anything that our layers do not support."""
    table: Callable[[ModelSpec], Table]
    """Function that returns every parameter of a model with this spec, in the files and in Megatron-Core."""
    known_as: tuple[str, str] | None = None
    """(`model_type`, architecture) under which transformers and the engines compute this model, if they have no name of
    their own for it."""
    mtp: MTPNames = MTP_BEHIND
    """Names of multi-token prediction layers in the files."""
