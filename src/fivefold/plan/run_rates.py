"""The GPUs that a run is for, with their rates: configuration -> RunRates. No torch here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fivefold.config import RunConfig
from fivefold.config.engine import EngineConfig
from fivefold.config.machine import on_gpus
from fivefold.config.packages import flash_fault
from fivefold.plan.devices import gpu_kind
from fivefold.plan.efficiency import Efficiencies, flash_runs_on, load_rates
from fivefold.plan.hardware import Cluster


@dataclass(frozen=True)
class RunRates:
    """GPUs of a run and what is known of their speed."""

    cluster: Cluster
    rates: Efficiencies
    flash_fault: str | None
    """Why attention is not flash-attn-4's on GPUs that it supports; None if it is, or if it does not support them."""

    @classmethod
    def of(cls, config: RunConfig) -> RunRates | None:
        """Return the rates for the GPUs of a run; None if it is not on GPUs that are known. Raises ValueError if the rates
        of this machine cannot be read."""
        kind = gpu_kind(config.launch) if on_gpus(config.launch, config.trainer.device) else None
        if kind is None:
            return None
        fault = flash_fault() if flash_runs_on(kind) else None
        rates = Efficiencies(load_rates(), kind, fault is None)
        return cls(_cluster(kind, config.roles.world_size, config.engine), rates, fault)


def _cluster(kind: str, ranks: int, engine: EngineConfig) -> Cluster:
    """Return the GPUs of the ranks and of an engine on devices of its own."""
    gpus = ranks + (engine.layout.world_size if engine.layout is not None and engine.is_apart else 0)
    node = int(os.environ.get("LOCAL_WORLD_SIZE", 8))
    # If the last node is not full, the placement of its ranks is unknown: count full nodes.
    return Cluster(kind, -(-gpus // node) * node if gpus > node else gpus, node)
