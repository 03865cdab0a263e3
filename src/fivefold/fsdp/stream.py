"""The sharded model -> (name in the files, full tensor), layer by layer, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.packed_model import PackedModel, fsdp_modules
from fivefold.fsdp.parameters import LocalTensor, own_name


@torch.no_grad()
def stream_weights(model: PackedModel, tensors: list[LocalTensor], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, each until the next is requested; collective: every rank must iterate to the end.

    FSDP gathers a layer in the dtype of computation, all its parameters at once.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    names = {id(module): name for name, module in model.named_modules()}
    units = list(fsdp_modules(model))
    inner = {id(unit): names[id(unit)] for unit in units if unit is not model}
    for unit in units:
        prefix = names[id(unit)]
        unit.unshard()
        try:
            for name, parameter in unit.named_parameters():
                full = f"{prefix}.{name}" if prefix else name
                if unit is model and any(full.startswith(f"{other}.") for other in inner.values()):
                    continue
                tensor = by_name[own_name(full)]
                gathered = _whole(parameter.detach(), tensor, mesh)
                for file in tensor.files:
                    yield file.name, file.of(gathered)
        finally:
            unit.reshard()
    for tensor in tensors:
        if not tensor.is_sharded:
            yield tensor.files[0].name, tensor.values


def _whole(values: Tensor, tensor: LocalTensor, mesh: Mesh) -> Tensor:
    """Put the parts of tensor-parallel ranks together."""
    dim = tensor.split.dim
    if dim is None:
        return values
    gathered = values.new_empty(mesh.tp.size(), *values.shape)
    dist.all_gather_into_tensor(gathered.view(-1, *values.shape[1:]), values.contiguous(), group=mesh.tp)
    return torch.cat(list(gathered), dim)
