"""Fivefold: RL post-training of language models on Megatron-Core, five-fold parallel."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.algo.objective import Objective, make_objective
    from fivefold.checkpoint.export import export
    from fivefold.columns import Column
    from fivefold.config import ConfigError, RunConfig
    from fivefold.environments import Step
    from fivefold.launch.start import train
    from fivefold.observability.curve import Figure, figure, load_metrics
    from fivefold.plan.check import check
    from fivefold.trainer.own_loop import prepare_update
    from fivefold.types import TokenBatch

__version__ = "0.1.0"
__all__ = [
    "Column", "ConfigError", "Figure", "Objective", "RunConfig", "Step", "TokenBatch", "check", "export", "figure",
    "load_metrics", "make_objective", "prepare_update", "train",
]  # fmt: skip

_HOMES = {
    "Column": "fivefold.columns",
    "ConfigError": "fivefold.config",
    "Objective": "fivefold.algo.objective",
    "Figure": "fivefold.observability.curve",
    "RunConfig": "fivefold.config",
    "Step": "fivefold.environments",
    "TokenBatch": "fivefold.types",
    "check": "fivefold.plan.check",
    "export": "fivefold.checkpoint.export",
    "figure": "fivefold.observability.curve",
    "load_metrics": "fivefold.observability.curve",
    "make_objective": "fivefold.algo.objective",
    "prepare_update": "fivefold.trainer.own_loop",
    "train": "fivefold.launch.start",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `fivefold check` runs without importing torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
