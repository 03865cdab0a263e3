"""What `policy.offload` moves of a model on Megatron-Core: part -> tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.backend.offload import Offload
from fivefold.config.learners import OffloadConfig
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.optim.adam import initial_state
from fivefold.megatron.optim.updater import Updater


def offload_of(settings: OffloadConfig, device: torch.device, chunks: list[PolicyModel], updater: Updater | None) -> Offload:
    """Return what offloads a model's parts."""
    return Offload(settings, device, partial(tensors_of, chunks, updater), partial(later_moments, updater))


def tensors_of(chunks: list[PolicyModel], updater: Updater | None, name: str) -> list[Tensor]:
    """Return the tensors of a part: parameters, optimizer, gradients."""
    parameters = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
    if name == "parameters":
        return parameters
    if updater is None:
        return []
    if name == "gradients":
        return [buffer.grad_data for ddp in updater.ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers]
    # Parameters that are float32 themselves have no copy in the optimizer: its shards are views of them.
    shared = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    # Copies of parameters come first: their host memory is used again once there are moments.
    copies, moments = [], []
    for adam, parameter in _optimized(updater):
        copies.append(parameter.data)
        moments += _moments(adam.state.get(parameter, {}))
    return [tensor for tensor in [*copies, *moments] if tensor.untyped_storage().data_ptr() not in shared]


def later_moments(updater: Updater | None) -> list[Tensor]:
    """Return tensors without data, of the sizes of the moments that Adam has not created yet."""
    later = [(adam, parameter) for adam, parameter in _optimized(updater) if not adam.state.get(parameter)]
    return [one for adam, parameter in later for one in _moments(initial_state(adam, parameter.to("meta")))]


def _optimized(updater: Updater | None) -> list[tuple[Any, Tensor]]:
    """Return each tensor that is optimized, with its optimizer."""
    outer = [] if updater is None else updater.optimizer.chained_optimizers
    adams = [one.optimizer for one in outer if one.optimizer is not None]
    return [(adam, parameter) for adam in adams for group in adam.param_groups for parameter in group["params"]]


def _moments(state: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a parameter's state. Step counts stay: they are single numbers on the host."""
    return [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
