"""Fivefold: RL post-training of language models on Megatron-Core, five-fold parallel."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.algo.objective import Objective, make_objective
    from fivefold.checkpoint.export import export
    from fivefold.config import ConfigError, RunConfig
    from fivefold.launch.start import train
    from fivefold.plan.check import check

__version__ = "0.1.0"
__all__ = [
    "ConfigError", "Objective", "RunConfig", "check", "export", "make_objective", "train",
]  # fmt: skip

_HOMES = {
    "ConfigError": "fivefold.config",
    "Objective": "fivefold.algo.objective",
    "RunConfig": "fivefold.config",
    "check": "fivefold.plan.check",
    "export": "fivefold.checkpoint.export",
    "make_objective": "fivefold.algo.objective",
    "train": "fivefold.launch.start",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `fivefold check` runs without importing torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
