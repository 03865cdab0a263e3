"""The process groups of a layout: ParallelLayout -> Mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from fivefold.distributed.groups import own_groups_only
from fivefold.distributed.ranks import Ranks
from fivefold.layout import ParallelLayout
from fivefold.megatron.patches import cuda_shim, te_stubs


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
    def cp(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        return group

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters: those that see other samples or other parts of them."""
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return group

    @property
    def experts(self) -> dist.ProcessGroup:
        """Ranks that together hold all experts of a layer: expert-tensor fastest, then expert."""
        group: dist.ProcessGroup = parallel_state.get_expert_tensor_and_model_parallel_group()
        return group

    @property
    def expert_dp(self) -> dist.ProcessGroup:
        """Ranks that hold the same shards of experts."""
        group: dist.ProcessGroup = parallel_state.get_expert_data_parallel_group()
        return group

    @property
    def stage(self) -> dist.ProcessGroup:
        """All ranks of this pipeline stage."""
        group: dist.ProcessGroup = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
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
    te_stubs.define()
    if device.type == "cpu":
        cuda_shim.install()
    with own_groups_only():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=math.ceil(timeout_minutes),
            create_gloo_process_groups=False,
        )
    # Stages differ in their draws, or every stage would repeat the first one's.
    model_parallel_cuda_manual_seed(seed + 100 * ranks.coords.pp)
    mesh = Mesh(ranks, device)
    place = ranks.coords
    found = (mesh.tp.rank(), mesh.cp.rank(), parallel_state.get_data_parallel_rank(), mesh.pp.rank())
    assert found == (place.tp, place.cp, place.dp, place.pp), "rank order differs from Megatron-Core's"
    assert mesh.experts.rank() == place.ep * layout.etp + place.etp and mesh.expert_dp.rank() == place.edp
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
