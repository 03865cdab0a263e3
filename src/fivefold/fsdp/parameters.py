"""This rank's part of every parameter, and the tensors of the files that it comes from: PackedModel -> LocalTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold.backend.sharded_files import Box, Shape
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.packed_model import VALUE_HEAD, PackedModel
from fivefold.fsdp.tensor_parallel import Split
from fivefold.models.parameters import MappedParameter


@dataclass(frozen=True)
class FileTensor:
    """A tensor in the model's files, and its place in the parameter that transformers keeps it in."""

    name: str
    shape: Shape
    expert: int | None = None
    """Index in the first dimension of a parameter that stacks experts."""
    begin: int = 0
    """Its first row, where a parameter joins several tensors."""

    def of(self, full: Tensor) -> Tensor:
        """Return the part of a whole parameter that this tensor is; a view."""
        if self.expert is not None:
            full = full[self.expert]
        return full if full.shape == self.shape else full[self.begin : self.begin + self.shape[0]]


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer of this rank."""

    name: str
    """Name in transformers' memory."""
    values: Tensor
    """This rank's elements; they share the memory of the model's own."""
    shape: Shape
    """Shape of the whole tensor."""
    box: Box
    """The elements of this rank in the whole tensor."""
    split: Split
    parameter: torch.nn.Parameter | None
    """The sharded parameter; None for a buffer, which every rank holds whole."""
    files: tuple[FileTensor, ...]

    @property
    def is_sharded(self) -> bool:
        return self.parameter is not None

    def pieces(self, values: Tensor) -> Iterator[tuple[FileTensor, Box, Tensor]]:
        """Yield what `values`, in the shape of this rank's elements, holds of each tensor of the files: box and view."""
        first = self.box.offset[0] if self.shape else 0
        for file in self.files:
            if file.expert is not None:
                # Whole experts are sharded: FSDP splits the first dimension.
                if first <= file.expert < first + len(values):
                    yield file, Box((0,) * len(file.shape), file.shape), replace(file, expert=file.expert - first).of(values)
            elif values.numel():
                yield file, self.box, values


def local_tensors(
    model: PackedModel, splits: Mapping[str, Split], mesh: Mesh, mapped: Sequence[MappedParameter]
) -> list[LocalTensor]:
    """Return the parameters and the buffers that belong to the files, in the order of the model.

    `mapped` is our table of the family: which tensors of the files transformers joins. Without one, files and memory have
    the same names.
    """
    joined: dict[str, list[MappedParameter]] = {}
    for item in mapped:
        if item.transformers is not None:
            joined.setdefault(item.transformers, []).append(item)
    return [*_parameters(model, splits, mesh, joined), *_buffers(model)]


def _parameters(
    model: PackedModel, splits: Mapping[str, Split], mesh: Mesh, joined: Mapping[str, list[MappedParameter]]
) -> Iterator[LocalTensor]:
    parts, rank = mesh.shard.size(), mesh.shard.rank()
    for full_name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{full_name} is not sharded"
        name, split, values = own_name(full_name), splits[full_name], parameter.to_local().detach()
        local_shape = list(parameter.shape)
        shape, offset = list(local_shape), [0] * len(local_shape)
        if split.dim is not None:
            shape[split.dim] *= mesh.tp.size()
            offset[split.dim] = mesh.tp.rank() * local_shape[split.dim]
        rows = -(-local_shape[0] // parts)
        begin = min(rank * rows, local_shape[0])
        size = (min(rows, local_shape[0] - begin), *local_shape[1:])
        offset[0] += begin
        assert tuple(values.shape) == size, f"{name}: FSDP holds {tuple(values.shape)} in place of {size}"
        files = _files(name, tuple(shape), joined.get(name, ()))
        yield LocalTensor(name, values, tuple(shape), Box(tuple(offset), size), split, parameter, files)


def _files(name: str, shape: Shape, items: Sequence[MappedParameter]) -> tuple[FileTensor, ...]:
    """Return the tensors of the files that a parameter of this shape holds."""
    tensors = []
    for item in items:
        if item.expert is None and len(item.hf) == 1:
            tensors.append(FileTensor(item.hf[0], shape))
            continue
        inner = shape if item.expert is None else shape[1:]
        rows = inner[0] // len(item.hf)
        for number, file_name in enumerate(item.hf):
            tensors.append(FileTensor(file_name, (rows, *inner[1:]), item.expert, number * rows))
    return tuple(tensors) or (FileTensor(name, shape),)


def _buffers(model: PackedModel) -> Iterator[LocalTensor]:
    lasting = set(model.state_dict(keep_vars=True)) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for full_name, buffer in model.named_buffers():
        if full_name in lasting:
            name, shape = own_name(full_name), tuple(buffer.shape)
            box = Box((0,) * len(shape), shape)
            yield LocalTensor(name, buffer, shape, box, Split(), None, (FileTensor(name, shape),))


def own_name(name: str) -> str:
    """Return the name that transformers gives a parameter of PackedModel."""
    return VALUE_HEAD if name == VALUE_HEAD else name.removeprefix("model.")
