"""What this rank holds of every parameter, and where that lies in the whole model: PackedModel -> LocalTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold.backend.sharded_files import Box, Shape
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.packed_model import VALUE_HEAD, PackedModel
from fivefold.fsdp.tensor_parallel import Split


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer of this rank: its elements, and the box that they are of the whole tensor."""

    name: str
    """Name in the files of the model."""
    values: Tensor
    """This rank's elements; they share the memory of the model's own."""
    shape: Shape
    """Shape of the whole tensor."""
    box: Box
    split: Split
    parameter: torch.nn.Parameter | None
    """The sharded parameter; None for a buffer, which every rank holds whole."""

    @property
    def is_sharded(self) -> bool:
        return self.parameter is not None


def local_tensors(model: PackedModel, splits: Mapping[str, Split], mesh: Mesh) -> list[LocalTensor]:
    """Return the parameters and the buffers that belong to the files, in the order of the model."""
    return [*_parameters(model, splits, mesh), *_buffers(model)]


def _parameters(model: PackedModel, splits: Mapping[str, Split], mesh: Mesh) -> Iterator[LocalTensor]:
    parts, own = mesh.shard.size(), mesh.shard.rank()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        split, values = splits[name], parameter.to_local().detach()
        here = list(parameter.shape)
        shape, offset = list(here), [0] * len(here)
        if split.dim is not None:
            shape[split.dim] *= mesh.tp.size()
            offset[split.dim] = mesh.tp.rank() * here[split.dim]
        rows = -(-here[0] // parts)
        begin = min(own * rows, here[0])
        size = (min(rows, here[0] - begin), *here[1:])
        offset[0] += begin
        assert tuple(values.shape) == size, f"{name}: FSDP holds {tuple(values.shape)} in place of {size}"
        yield LocalTensor(file_name(name), values, tuple(shape), Box(tuple(offset), size), split, parameter)


def _buffers(model: PackedModel) -> Iterator[LocalTensor]:
    lasting = set(model.state_dict(keep_vars=True)) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.named_buffers():
        if name in lasting:
            shape = tuple(buffer.shape)
            yield LocalTensor(file_name(name), buffer, shape, Box((0,) * len(shape), shape), Split(), None)


def file_name(name: str) -> str:
    """Return the name in files of a parameter of PackedModel."""
    return VALUE_HEAD if name == VALUE_HEAD else name.removeprefix("model.")
