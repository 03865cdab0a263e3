"""The hosts of a run and their GPUs: what the configuration requests, what the layouts take, what the launcher reports."""

from __future__ import annotations

import os

from fivefold.config import RunConfig
from fivefold.config.machine import elsewhere, hosts, is_joined, is_node_of_job
from fivefold.keys.findings import Findings

_COUNTS = ("SLURM_STEP_NUM_NODES", "GROUP_WORLD_SIZE")
"""Variables of Slurm and torchrun with the number of hosts."""


def gpus_of(config: RunConfig) -> int:
    """Return the number of GPUs that ranks, servers apart from them and a judge's servers take."""
    servers = (config.engine.layout if config.engine.is_apart else None, config.reward.judge_layout)
    return config.roles.world_size + sum(layout.world_size for layout in servers if layout is not None)


def ranks_of_machine(config: RunConfig) -> int:
    """Return the largest number of ranks that one machine of the run may have."""
    world, gpus = config.roles.world_size, gpus_of(config)
    if is_joined(config.launch):
        return int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return min(world, config.launch.gpus_per_node or -(-gpus // (hosts(config.launch, gpus) or 1)))


def check_hosts(findings: Findings, config: RunConfig) -> None:
    """Check launch.nodes and launch.gpus_per_node against the layouts and the launcher."""
    launch, gpus = config.launch, gpus_of(config)
    if is_node_of_job():
        _check_node_of_job(findings, launch.backend == "ray")
    if (wanted := hosts(launch, gpus)) is None:
        return
    per_node = launch.gpus_per_node or gpus // wanted
    if wanted * per_node != gpus:
        few = "few" if wanted * per_node < gpus else "many"
        findings.error(
            "launch.nodes" if launch.gpus_per_node is None else "launch.gpus_per_node",
            f": {wanted} host{'s' if wanted > 1 else ''} of {per_node} GPUs have {wanted * per_node}, too {few} for layouts "
            f"that take {gpus}{_parts(config)}: change the layouts, launch.nodes or launch.gpus_per_node",
        )
    elif is_joined(launch):
        _compare_joined(findings, wanted, per_node, gpus, config.roles.world_size)
    elif wanted > 1 and not elsewhere(launch) and launch.gpu is None:
        findings.error(
            "launch.nodes",
            f": {wanted} hosts are requested, and this command starts all ranks on 1: start it on {wanted} hosts by "
            "torchrun or srun, or set launch.backend: ray and launch.ray.address",
        )


def _check_node_of_job(findings: Findings, on_ray: bool) -> None:
    """Check that a host of a PyTorchJob starts the run through a launcher, and once only with Ray."""
    count, number = os.environ["PET_NNODES"].partition(":")[0], os.environ.get("PET_NODE_RANK", "0")
    place = f": this is host {number} of {count} (PET_NODE_RANK, PET_NNODES), "
    if on_ray:
        findings.require(number == "0", "launch.backend", place + "and a run on Ray is started on host 0 alone")
    else:
        findings.require(
            count == "1",
            "launch.backend",
            place + "and no launcher started ranks on it: start `torchrun -m fivefold.cli train ...` on each host, which "
            "reads PET_*, or set launch.backend: ray and start the run on host 0",
        )


def _parts(config: RunConfig) -> str:
    """Return how the GPUs divide into those of ranks and those of servers, as text; empty if only ranks take GPUs."""
    ranks, servers = config.roles.world_size, gpus_of(config) - config.roles.world_size
    return f" ({ranks} for ranks, {servers} for servers)" if servers else ""


def _compare_joined(findings: Findings, wanted: int, per_node: int, gpus: int, ranks: int) -> None:
    """Compare with the number of hosts, and of ranks on this one, that the launcher of this rank reports."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    count = next((int(os.environ[name]) for name in _COUNTS if name in os.environ), ranks // local if local else wanted)
    if count != wanted:
        findings.error("launch.nodes", f": {wanted} requested, and the launcher started ranks on {count}")
    elif local and local * gpus != per_node * ranks:
        findings.error(
            "launch.gpus_per_node",
            f": {per_node * ranks // gpus} ranks are requested on each host, and the launcher started {local} on this one",
        )
