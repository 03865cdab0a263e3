"""What a file under `families/` defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fivefold.models.parameters import MTP_BEHIND, MTPNames, Table
from fivefold.models.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """Models that share one way to write `config.json` and one way to name their parameters."""

    name: str
    """`model_type` in config.json; the file has the same name."""
    read: Callable[[dict[str, Any]], ModelSpec]
    """Parsed `config.json` -> spec; raises ValueError for what our layers do not compute, by its key."""
    table: Callable[[ModelSpec], Table]
    """Every parameter of a model of this spec, in the files and in Megatron-Core."""
    known_as: tuple[str, str] | None = None
    """(`model_type`, architecture) by which transformers and the engines compute this model, where they have no name of its
    own for it."""
    mtp: MTPNames = MTP_BEHIND
    """How its files name layers of multi-token prediction."""
