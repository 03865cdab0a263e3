"""The trainers: backend of a layout -> process groups and model on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fivefold.fsdp.mesh as fsdp
import fivefold.megatron.mesh as megatron
from fivefold.distributed.ranks import Ranks
from fivefold.fsdp.model import FSDPModel
from fivefold.layout import ParallelLayout
from fivefold.megatron.model import MegatronModel


@dataclass(frozen=True)
class Backend:
    """A trainer; its functions take what any of them needs, by name."""

    mesh: Callable[..., Any]
    """Creates the groups of a layout on its ranks: ranks, device, replicas, seed, timeout_minutes."""
    model: Callable[..., Any]
    """Builds a model on such a mesh."""


def _megatron_mesh(ranks: Ranks, device: torch.device, replicas: int, seed: int, timeout_minutes: float) -> megatron.Mesh:
    return megatron.build_mesh(ranks, device, seed, timeout_minutes)


def _fsdp_mesh(ranks: Ranks, device: torch.device, replicas: int, seed: int, timeout_minutes: float) -> fsdp.Mesh:
    return fsdp.build_mesh(ranks, device, replicas)


def _megatron_model(*, trust_remote_code: bool = False, **arguments: Any) -> MegatronModel:
    return MegatronModel(**arguments)


def _fsdp_model(*, bucket_mb: int = 0, stored_in: str | None = None, **arguments: Any) -> FSDPModel:
    """Build the model; its weights stream layer by layer, in pieces that FSDP made."""
    return FSDPModel(**arguments)


BACKENDS = {"megatron": Backend(_megatron_mesh, _megatron_model), "fsdp": Backend(_fsdp_mesh, _fsdp_model)}
"""Backend in a layout -> trainer."""


class Meshes:
    """The meshes of a run's models, one per distinct layout and first rank; all ranks request them in the same order."""

    def __init__(self, ranks: Ranks, device: torch.device, seed: int, timeout_minutes: float, replicas: int = 1) -> None:
        """Build the mesh of the policy, whose layout `ranks` are in; `replicas`: whole copies of it in an `fsdp:` layout."""
        self.ranks, self._device = ranks, device
        self._settings: dict[str, Any] = {"seed": seed, "timeout_minutes": timeout_minutes}
        self._made = [(ranks, replicas, self._build(ranks, replicas))]

    def of(self, layout: ParallelLayout, first: int = 0, replicas: int = 1) -> tuple[Ranks, Any]:
        """Return the ranks of a layout that starts at rank `first`, and its mesh on these ranks (None elsewhere)."""
        for ranks, copies, mesh in self._made:
            if (ranks.first, copies) == (first, replicas) and ranks.layout.is_same(layout):
                return ranks, mesh
        ranks = self.ranks.on_layout(layout, first)
        # Draws from the default random state must be the same as if only the policy's mesh existed.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            self._made.append((ranks, replicas, self._build(ranks, replicas)))
        return ranks, self._made[-1][2]

    def _build(self, ranks: Ranks, replicas: int) -> Any:
        if not ranks.holds:
            return None
        return BACKENDS[ranks.layout.backend].mesh(ranks, self._device, replicas, **self._settings)
