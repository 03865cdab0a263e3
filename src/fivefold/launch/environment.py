"""Environment variables of a rank: torchrun, Slurm and our own launcher name a rank in different ways."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence

from fivefold.config.machine import is_node_of_job
from fivefold.errors import UserError

OWN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_FORWARDED = (
    "HF_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "WANDB_*", "NCCL_*", "GLOO_*", "CUDA_*", "CUBLAS_*",
    "CUDNN_*", "NVTE_*", "TORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "FLASH_ATTENTION_*", "PYTORCH_*", "VLLM_*", "SGLANG_*",
    "FIVEFOLD_*", "MLFLOW_*", "SWANLAB_*", "TRACKIO_*", "PYTHONPATH",
)  # fmt: skip
"""Variables that change how libraries of the ranks work. All others keep the value of the node."""
_OF_A_MACHINE = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CUDA_BIN_PATH")
_FIRST_PORT, _PORTS = 15000, 17000
"""Range of ports below those that systems assign to outgoing connections."""


def launched_externally(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process is already a rank, started by torchrun, Slurm or Kubernetes."""
    is_rank = "RANK" in environment and "WORLD_SIZE" in environment and not is_node_of_job(environment)
    return is_rank or _is_slurm_task(environment)


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Returns whether `srun` started this process as one of several tasks.

    False for a shell in an allocation and for a single task, which starts its ranks itself.
    """
    return "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def complete(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the ranks of every launcher have: the identity of this rank, and what libraries read at
    startup.

    Raises ValueError if the identity cannot be determined.
    """
    if "RANK" not in environment and _is_slurm_task(environment):
        for name, source in _SLURM.items():
            environment[name] = environment[source]
        # Number of tasks on each node, as in `8(x2),4`.
        count = environment["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0].partition(",")[0]
        environment.setdefault("LOCAL_WORLD_SIZE", count)
        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        environment.setdefault("MASTER_ADDR", first_host(nodes))
        # The port is the same on every task, and differs for each step of each job.
        number = 31 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
        environment.setdefault("MASTER_PORT", str(_FIRST_PORT + number % _PORTS))
    if missing := [name for name in OWN if name not in environment and name != "LOCAL_RANK"]:
        raise UserError(f"a rank needs {', '.join(OWN)} in its environment: {', '.join(missing)} is missing")
    if "LOCAL_RANK" not in environment:
        environment["LOCAL_RANK"] = str(_local_rank(environment))
    if "LOCAL_WORLD_SIZE" in environment:
        # Otherwise every rank would start as many threads as the machine has cores.
        threads = max(1, (os.cpu_count() or 1) // int(environment["LOCAL_WORLD_SIZE"]))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    # Megatron-Core overlaps communication with computation by the order of kernels on one queue.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def forwarded(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Returns the variables that a launcher copies from its own environment to ranks on other machines.

    `more`: further names, or prefixes of names with a *. Raises ValueError if one of those is not set.
    """

    def matches(name: str, forms: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, form) for form in forms)

    if unset := [form for form in more if not any(matches(name, [form]) for name in environment)]:
        raise UserError(f"launch.ray.env_vars: {', '.join(unset)} must be set where the run is started")
    usual = {name for name in environment if matches(name, _FORWARDED) and not matches(name, _OF_A_MACHINE)}
    return {name: value for name, value in environment.items() if name in usual or matches(name, more)}


def _local_rank(environment: Mapping[str, str]) -> int:
    """Returns the rank's number on its node, from the variables of other launchers or from the number of ranks on each
    node."""
    for name in ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"):
        if name in environment:
            return int(environment[name])
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if "LOCAL_WORLD_SIZE" in environment:
        return rank % int(environment["LOCAL_WORLD_SIZE"])
    if world_size == 1:
        return 0
    raise UserError(
        f"rank {rank} of {world_size} needs its number on its node, which chooses its GPU: set LOCAL_RANK, or "
        "LOCAL_WORLD_SIZE where every node has the same number of ranks"
    )


def first_host(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation: `gpu[03-06,9],login1` begins with gpu03."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST must name hosts: got {nodes!r}")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"
