"""Layout-free checkpoints through Megatron-Core's dist_checkpointing: parameters, moments, schedule."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.optim.adam import PrecisionAwareAdam
from fivefold.megatron.optim.updater import Updater
from fivefold.megatron.patches.quiet import quiet
from fivefold.megatron.replica_check import verify_copies


def save(path: Path, chunks: list[PolicyModel], updater: Updater | None, mesh: Mesh) -> None:
    """Write parameters and, with a updater, optimizer and schedule into the existing directory `path`."""
    if updater is not None:
        _ensure_moments(updater)
    # A save that is waited for returns its results in this process. For a queue between processes Megatron-Core would start
    # a Python on every rank.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    with quiet("megatron.core"):
        dist_checkpointing.save(_state(chunks, updater, mesh, loading=False), str(path))


def load(path: Path, chunks: list[PolicyModel], updater: Updater | None, mesh: Mesh) -> None:
    """Read what `save` wrote on any layout; without a updater the parameters only."""
    if updater is not None:
        _ensure_moments(updater)
    with quiet("megatron.core"):
        state = dist_checkpointing.load(_state(chunks, updater, mesh, loading=True), str(path))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{number}"])
    if updater is not None:
        _load_optimizer(updater, state["optimizer"])
        updater.schedule.load_state_dict(state["schedule"])
    # Equal copies are not a given after loading.
    verify_copies(chunks, mesh)


def _state(chunks: list[PolicyModel], updater: Updater | None, mesh: Mesh, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mesh.dp,
    }
    models = {
        f"model{number}": chunk.sharded_state_dict(prefix="model.", metadata=metadata) for number, chunk in enumerate(chunks)
    }
    state: dict[str, Any] = dict(models)
    if updater is not None:
        # With one chunk Megatron-Core's optimizers want the chunk's own state.
        whole = models if len(chunks) > 1 else models["model0"]
        state["optimizer"] = updater.optimizer.sharded_state_dict(whole, is_loading=loading, metadata=metadata)
        state["schedule"] = updater.schedule.state_dict()
    # Module.load_state_dict wants names without the checkpoint's prefix.
    for name in models:
        state[name] = {key.removeprefix("model."): value for key, value in state[name].items()}
    return state


def _adams(updater: Updater) -> list[Any]:
    """Megatron-Core's optimizers, each around one torch Adam: of dense parameters and of experts."""
    return [outer for outer in updater.optimizer.chained_optimizers if not outer.is_stub_optimizer]


def _ensure_moments(updater: Updater) -> None:
    """torch's Adam has no state before its first step, but Megatron-Core asks for it: step 0, zero moments.

    A stage without experts has an optimizer of experts all the same, without parameters: it is given a step to tell.
    """
    for outer in _adams(updater):
        adam = outer.optimizer
        if not outer.get_parameters():
            adam.state["no parameters"] = {"step": torch.tensor(float(updater.schedule.num_steps))}
        for group in adam.param_groups:
            for parameter in group["params"]:
                if adam.state[parameter]:
                    continue
                if isinstance(adam, PrecisionAwareAdam):
                    adam.initialize_state(parameter)
                else:
                    adam.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _load_optimizer(updater: Updater, loaded: dict[str, Any]) -> None:
    """Megatron-Core expects Adam's step in the group; torch keeps one a parameter.

    Its loading would put one shared step tensor into all parameters, which a foreach Adam then advances once a
    parameter: bias correction would be wrong after every resume. So the step is taken out while the moments are
    loaded, and each parameter gets its own.
    """
    adams = _adams(updater)
    states = [loaded] if len(adams) == 1 else [loaded[number] for number in sorted(loaded)]
    for outer, state in zip(adams, states, strict=True):
        # The configuration of this run decides, not the one that wrote the checkpoint.
        configured = [{key: value for key, value in group.items() if key != "params"} for group in outer.param_groups]
        outer.load_state_dict({key: value for key, value in state.items() if not key.startswith("param_state")})
        adam = outer.optimizer
        for group, settings in zip(adam.param_groups, configured, strict=True):
            group.update(settings)
        if not isinstance(outer, DistributedOptimizer):
            # It loads its moments with the rest, and gives each parameter its own step.
            continue
        steps: dict[Tensor, float] = {parameter: float(own.pop("step")) for parameter, own in adam.state.items()}
        if outer.get_parameters():
            outer.load_parameter_state_from_fully_reshardable(state["param_state"])
        for parameter, step in steps.items():
            adam.state[parameter]["step"] = torch.tensor(step)
