"""Layout-free checkpoints through Megatron-Core's dist_checkpointing: parameters, moments, schedule."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import Tensor

from fivefold.megatron.build import Trainer
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.spec import PolicyModel


def save(path: Path, module: PolicyModel, trainer: Trainer | None, mesh: Mesh) -> None:
    """Write parameters and, with a trainer, optimizer and schedule into the existing directory `path`."""
    if trainer is not None:
        _ensure_moments(trainer)
    with _quiet():
        dist_checkpointing.save(_state(module, trainer, mesh, loading=False), str(path))


def load(path: Path, module: PolicyModel, trainer: Trainer | None, mesh: Mesh) -> None:
    """Read what `save` wrote on any layout; without a trainer the parameters only."""
    if trainer is not None:
        _ensure_moments(trainer)
    with _quiet():
        state = dist_checkpointing.load(_state(module, trainer, mesh, loading=True), str(path))
    module.load_state_dict(state["model"])
    if trainer is not None:
        _load_optimizer(trainer, state["optimizer"])
        trainer.schedule.load_state_dict(state["schedule"])
    _assert_replicas_agree(module, mesh)


def _state(module: PolicyModel, trainer: Trainer | None, mesh: Mesh, loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": mesh.dp}
    state: dict[str, Any] = {"model": module.sharded_state_dict(prefix="model.", metadata=metadata)}
    if trainer is not None:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
        state["schedule"] = trainer.schedule.state_dict()
    # Module.load_state_dict wants names without the checkpoint's prefix.
    state["model"] = {name.removeprefix("model."): value for name, value in state["model"].items()}
    return state


def _adams(trainer: Trainer) -> list[Any]:
    """Megatron-Core's optimizers, each around one torch Adam."""
    return list(trainer.optimizer.chained_optimizers)


def _ensure_moments(trainer: Trainer) -> None:
    """torch's Adam has no state before its first step, but Megatron-Core asks for it: step 0, zero moments."""
    for outer in _adams(trainer):
        adam = outer.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _load_optimizer(trainer: Trainer, loaded: dict[str, Any]) -> None:
    """Megatron-Core expects Adam's step in the group; torch keeps one a parameter.

    Its loading would put one shared step tensor into all parameters, which a foreach Adam then advances once a
    parameter: bias correction would be wrong after every resume. So the step is taken out while the moments are
    loaded, and each parameter gets its own.
    """
    adams = _adams(trainer)
    assert len(adams) == 1, "one optimizer a rank"
    for outer, state in zip(adams, [loaded], strict=True):
        groups = {key: value for key, value in state.items() if not key.startswith("param_state")}
        # The configuration of this run decides, not the one that wrote the checkpoint.
        configured = [{key: value for key, value in group.items() if key != "params"} for group in outer.param_groups]
        outer.load_state_dict(groups)
        adam = outer.optimizer
        for group, settings in zip(adam.param_groups, configured, strict=True):
            group.update(settings)
        steps: dict[Tensor, float] = {parameter: float(own.pop("step")) for parameter, own in adam.state.items()}
        outer.load_parameter_state_from_fully_reshardable(state["param_state"])
        for parameter, step in steps.items():
            adam.state[parameter]["step"] = torch.tensor(step)


def _assert_replicas_agree(module: PolicyModel, mesh: Mesh) -> None:
    """Equal copies over data-parallel replicas are not a given after loading: compare a digest."""
    digest = torch.stack([parameter.detach().double().sum() for parameter in module.parameters()])
    lowest, highest = digest.clone(), digest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.dp)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.dp)
    if not torch.equal(lowest, highest):
        names = [name for (name, _), same in zip(module.named_parameters(), lowest == highest, strict=True) if not same]
        raise RuntimeError(f"data-parallel replicas differ after loading in {len(names)} parameters, the first: {names[:3]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron-Core and torch narrate each save; what a user must know is an exception."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
