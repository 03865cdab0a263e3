"""The process groups of layouts: ParallelLayout -> Mesh. Models of a run may have layouts of their own, on the same ranks or
on others.

Megatron-Core keeps the groups of one layout in globals of its modules and reads them wherever it builds, computes, steps and
saves, also where an argument could name them. So each mesh holds the globals of its layout, and they stand in those modules
only while the mesh is active.
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
"""Memory that any layer may use for a moment: one for all meshes."""
_OF_GROUPS = [name for name in vars(parallel_state) if name.startswith("_") and name[1:].isupper() and name not in _SCRATCH]
_OF_GROUPS.append("_global_process_group_list")
_OF_DRAWS = [name for name in vars(random) if name.startswith("_CUDA_RNG_STATE_TRACKER")]


class _Globals:
    """What Megatron-Core's modules hold of one layout: groups, sizes, virtual stages, states of random draws."""

    def __init__(self) -> None:
        self._groups = {name: getattr(parallel_state, name) for name in _OF_GROUPS}
        self._draws = {name: getattr(random, name) for name in _OF_DRAWS}

    def install(self) -> None:
        vars(parallel_state).update(self._groups)
        vars(random).update(self._draws)


_NO_LAYOUT = _Globals()
"""As the modules are imported: whoever asks for a group while no mesh is active is refused by Megatron-Core."""
_active: list[tuple[Mesh, int]] = []
"""The meshes that were entered and not left, the active one last, and the thread that entered each."""


@dataclass(frozen=True)
class Mesh:
    """This rank's groups of one layout."""

    ranks: Ranks
    device: torch.device
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    """Ranks that hold the same parameters: those that see other samples or other parts of them."""
    experts: dist.ProcessGroup
    """Ranks that together hold all experts of a layer: expert-tensor fastest, then expert."""
    expert_dp: dist.ProcessGroup
    """Ranks that hold the same shards of experts."""
    stage: dist.ProcessGroup
    """All ranks of this pipeline stage."""
    _globals: list[_Globals]
    """One: as they were when the mesh was left last."""

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
        """Megatron-Core works on this layout meanwhile: everything of it that asks for groups is called in here.

        That is forward and backward too, whose hooks ask. Costs microseconds.
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
        """The items, each made while this mesh is active; it is not while they are used."""
        iterator = iter(items)
        while True:
            with self.active():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


class Meshes:
    """The meshes of a run's models, one for each layout and place that differs; all ranks ask for them in the same order."""

    def __init__(self, ranks: Ranks, device: torch.device, seed: int, timeout_minutes: float) -> None:
        """`ranks` are those of the policy's layout."""
        self.ranks, self._device = ranks, device
        self._settings: dict[str, Any] = {"device": device, "seed": seed, "timeout_minutes": timeout_minutes}
        self._made = [(ranks, build_mesh(ranks, **self._settings) if ranks.holds else None)]

    def of(self, layout: ParallelLayout, first: int = 0) -> tuple[Ranks, Mesh | None]:
        """A layout from rank `first` on, and its mesh on the ranks that are there."""
        for ranks, mesh in self._made:
            if ranks.first == first and ranks.layout.is_same(layout):
                return ranks, mesh
        ranks = self.ranks.on_layout(layout, first)
        # What is drawn without asking for a state of a layout's own goes on as if there were the policy's only.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            self._made.append((ranks, build_mesh(ranks, **self._settings) if ranks.holds else None))
        return self._made[-1]


def build_mesh(ranks: Ranks, device: torch.device, seed: int, timeout_minutes: float) -> Mesh:
    """Make Megatron-Core's groups of the layout of `ranks` over the running process group."""
    layout = ranks.layout
    te_stubs.define()
    if device.type == "cpu":
        cuda_shim.install()
    gradients.install()
    activation.install()
    before, scratch = _Globals(), {name: getattr(parallel_state, name) for name in _SCRATCH}
    _NO_LAYOUT.install()
    # It makes its own, and refuses to where one is there.
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
        # Stages differ in their draws, or every stage would repeat the first one's.
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
        found = (mesh.tp.rank(), mesh.cp.rank(), parallel_state.get_data_parallel_rank(), mesh.pp.rank())
    finally:
        before.install()
    place = ranks.coords
    assert found == (place.tp, place.cp, place.dp, place.pp), "rank order differs from Megatron-Core's"
    assert mesh.experts.rank() == place.ep * layout.etp + place.etp and mesh.expert_dp.rank() == place.edp
    return mesh


def init_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Join the ranks of this run, over Gloo on hosts and over NCCL on GPUs."""
    rendezvous.join("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout_minutes)


def destroy() -> None:
    """Tear the groups down, so that a process ends without complaint."""
    if dist.is_initialized():
        dist.destroy_process_group()
