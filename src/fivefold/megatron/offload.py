"""The tensors of Megatron-Core's models and optimizers that `policy.offload` names."""

from __future__ import annotations

from torch import Tensor

from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.optim.updater import Updater


def tensors_of(name: str, chunks: list[PolicyModel], updater: Updater | None) -> list[Tensor]:
    """Return the tensors of a part: parameters, optimizer, gradients."""
    parameters = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
    if name == "parameters":
        return parameters
    if updater is None:
        return []
    if name == "gradients":
        ddps = updater.ddps
        return [buffer.grad_data for ddp in ddps for buffer in ddp.buffers + ddp.expert_parallel_buffers]
    # Parameters that are float32 themselves have no copy in the optimizer: its shards are views of them.
    shared = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    found = []
    for outer in updater.optimizer.chained_optimizers:
        if outer.optimizer is None:
            continue
        for group in outer.optimizer.param_groups:
            for parameter in group["params"]:
                state = outer.optimizer.state.get(parameter, {})
                # Adam's step counts stay: they are single numbers on the host.
                found += [parameter.data, *(v for v in state.values() if isinstance(v, Tensor) and v.numel() > 1)]
    return [tensor for tensor in found if tensor.untyped_storage().data_ptr() not in shared]
