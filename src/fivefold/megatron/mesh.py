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
from fivefold.ranks import Ranks


@dataclass(frozen=True)
class Mesh:
    """This rank's groups; one exists a process."""

    ranks: Ranks
    device: torch.device

    @property
    def layout(self) -> ParallelLayout:
        return self.ranks.layout

    @property
    def tp(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        return group

    @property
    def pp(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        return group

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters and see other samples."""
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return group

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


def build_mesh(ranks: Ranks, device: torch.device, seed: int, timeout_minutes: float) -> Mesh:
    """Initialise Megatron-Core's groups over the running process group."""
    layout = ranks.layout
    if device.type == "cpu":
        cpu.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
        create_gloo_process_groups=False,
    )
    # Stages differ in their draws, or every stage would repeat the first one's.
    model_parallel_cuda_manual_seed(seed + 100 * ranks.place.pp)
    mesh = Mesh(ranks, device)
    found = (mesh.tp.rank(), mesh.dp.rank(), mesh.pp.rank())
    assert found == (ranks.place.tp, ranks.place.dp, ranks.place.pp), "rank order differs from Megatron-Core's"
    return mesh


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
