"""Process groups of layouts: ParallelLayout -> Mesh.

The models of a run may have different layouts, on the same ranks or on others. Megatron-Core keeps the groups of one layout
in globals of its modules. It reads them wherever it builds, computes, steps and saves, even where an argument could name
them. Therefore each mesh stores the globals of its layout and installs them in those modules only while it is active.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random

from fivefold.distributed import rendezvous
from fivefold.distributed.groups import as_world, own_groups_only
from fivefold.distributed.ranks import Ranks
from fivefold.layout import ParallelLayout
from fivefold.megatron.patches import activation, cuda_shim, gradients, te_stubs

T = TypeVar("T")

_SCRATCH = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
"""Scratch buffers that any layer may use briefly: all meshes share them."""
_OF_GROUPS = [name for name in vars(parallel_state) if name.startswith("_") and name[1:].isupper() and name not in _SCRATCH]
_OF_GROUPS.append("_global_process_group_list")
_OF_DRAWS = [name for name in vars(random) if name.startswith("_CUDA_RNG_STATE_TRACKER")]


class _Globals:
    """The globals of Megatron-Core's modules for one layout: groups, sizes, virtual stages, random states."""

    def __init__(self) -> None:
        self._groups = {name: getattr(parallel_state, name) for name in _OF_GROUPS}
        self._draws = {name: getattr(random, name) for name in _OF_DRAWS}

    def install(self) -> None:
        vars(parallel_state).update(self._groups)
        vars(random).update(self._draws)


_NO_LAYOUT = _Globals()
"""The globals as imported: while no mesh is active, Megatron-Core refuses requests for a group."""
_active: list[tuple[Mesh, int]] = []
"""The meshes that were entered and not left, the active one last, each with the thread that entered it."""


@dataclass(frozen=True)
class Mesh:
    """The process groups of this rank in one layout."""

    ranks: Ranks
    device: torch.device
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    """Ranks that hold the same parameters but see other samples or other parts of them."""
    experts: dist.ProcessGroup
    """Ranks that together hold all experts of a layer; the expert-tensor rank varies fastest, then the expert rank."""
    expert_dp: dist.ProcessGroup
    """Ranks that hold the same expert shards."""
    stage: dist.ProcessGroup
    """All ranks of this pipeline stage."""
    _globals: list[_Globals]
    """One element: the globals as they were when the mesh was last left."""

    @property
    def layout(self) -> ParallelLayout:
        return self.ranks.layout

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def stage_ranks(self) -> list[int]:
        """Global ranks of this rank's pipeline, first stage first."""
        return dist.get_process_group_ranks(self.pp)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Activate this layout: all Megatron-Core code that needs process groups must run inside this context.

        This includes forward and backward, whose hooks read the groups. Activation costs microseconds.
        """
        thread = threading.get_ident()
        if _active and _active[-1][1] != thread:
            raise RuntimeError("models are called by one thread at a time: two would change each other's groups")
        if _active and _active[-1][0] is self:
            yield
            return
        before = _Globals()
        self._globals[0].install()
        _active.append((self, thread))
        try:
            yield
        finally:
            assert _active.pop()[0] is self, "meshes are left in another order than they were entered in"
            self._globals[0] = _Globals()
            before.install()

    def iterate(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items: each is made while this mesh is active, but the mesh is not active while the caller uses it."""
        iterator = iter(items)
        while True:
            with self.active():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


def build_mesh(ranks: Ranks, device: torch.device, seed: int, timeout_minutes: float) -> Mesh:
    """Create Megatron-Core's groups of the layout of `ranks` within the running process group."""
    layout = ranks.layout
    te_stubs.define()
    if device.type == "cpu":
        cuda_shim.install()
    gradients.install()
    activation.install()
    before, scratch = _Globals(), {name: getattr(parallel_state, name) for name in _SCRATCH}
    _NO_LAYOUT.install()
    # Megatron-Core creates these buffers itself and fails if they exist.
    vars(parallel_state).update(dict.fromkeys(_SCRATCH))
    generator = parallel_state.RankGenerator

    def from_first(*sizes: Any, **named: Any) -> Any:
        return generator(*sizes, **named | {"rank_offset": ranks.first})

    try:
        with own_groups_only(), as_world(ranks.members), patch.object(parallel_state, "RankGenerator", from_first):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                distributed_timeout_minutes=math.ceil(timeout_minutes),
                create_gloo_process_groups=False,
            )
        vars(parallel_state).update({name: buffer for name, buffer in scratch.items() if buffer is not None})
        # Each stage draws from its own seed; otherwise every stage would repeat the draws of the first.
        model_parallel_cuda_manual_seed(seed + 100 * ranks.coords.pp)
        mesh = Mesh(
            ranks,
            device,
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            dp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            experts=parallel_state.get_expert_tensor_and_model_parallel_group(),
            expert_dp=parallel_state.get_expert_data_parallel_group(),
            stage=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            _globals=[_Globals()],
        )
        megatron_place = (mesh.tp.rank(), mesh.cp.rank(), parallel_state.get_data_parallel_rank(), mesh.pp.rank())
    finally:
        before.install()
    place = ranks.coords
    assert megatron_place == (place.tp, place.cp, place.dp, place.pp), "rank order differs from Megatron-Core's"
    assert mesh.experts.rank() == place.ep * layout.etp + place.etp and mesh.expert_dp.rank() == place.edp
    return mesh


def init_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Join the ranks of this run, over Gloo on hosts and over NCCL on GPUs."""
    rendezvous.join("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout_minutes)


def destroy() -> None:
    """Destroy the process groups, so that the process exits without complaint."""
    if dist.is_initialized():
        dist.destroy_process_group()
