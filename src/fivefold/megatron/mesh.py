"""The process groups of a layout: ParallelLayout -> Mesh."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from fivefold.layout import ParallelLayout
from fivefold.megatron import cpu


@dataclass(frozen=True)
class Mesh:
    """This rank's groups; one exists a process."""

    layout: ParallelLayout
    device: torch.device
    pp_host: dist.ProcessGroup
    """The pipeline's ranks over Gloo, for numbers that live on the host."""
    replica_host: dist.ProcessGroup
    dp_host: dist.ProcessGroup

    @property
    def tp(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pp(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters and see other samples."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def replica(self) -> dist.ProcessGroup:
        """Ranks that together hold one copy of the model and see the same samples."""
        return parallel_state.get_model_parallel_group()

    @property
    def dp_rank(self) -> int:
        return self.dp.rank()

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


def build_mesh(layout: ParallelLayout, device: torch.device, seed: int, timeout_minutes: float) -> Mesh:
    """Initialise Megatron-Core's groups over the running process group."""
    world = dist.get_world_size()
    if world != layout.world_size:
        raise ValueError(f"layout {layout} needs {layout.world_size} ranks: got {world}")
    if device.type == "cpu":
        cpu.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
        create_gloo_process_groups=False,
    )
    # Stages differ in their draws, or every stage would repeat the first one's.
    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    mesh = Mesh(
        layout,
        device,
        pp_host=_host_group([_ranks(layout, tp=tp, dp=dp) for tp in range(layout.tp) for dp in range(layout.dp)]),
        replica_host=_host_group([_ranks(layout, dp=dp) for dp in range(layout.dp)]),
        dp_host=_host_group([_ranks(layout, tp=tp, pp=pp) for tp in range(layout.tp) for pp in range(layout.pp)]),
    )
    place = layout.coordinates(dist.get_rank())
    assert (place.tp, place.dp, place.pp) == (mesh.tp.rank(), mesh.dp_rank, mesh.pp.rank()), "rank order differs from mcore's"
    return mesh


def _ranks(layout: ParallelLayout, **fixed: int) -> list[int]:
    """Ranks whose coordinates have these values."""
    return [
        rank
        for rank in range(layout.world_size)
        if all(getattr(layout.coordinates(rank), name) == value for name, value in fixed.items())
    ]


def _host_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """This rank's Gloo group among `groups`, which cover all ranks."""
    own = None
    for ranks in groups:
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own


def init_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Join the ranks named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))


def destroy() -> None:
    """Tear the groups down, so that a process ends without complaint."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
