"""This rank's part of every parameter, and the tensors of the files that it comes from: PackedModel -> LocalTensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold.backend.file_names import FileTensor, tensors_in_files
from fivefold.backend.sharded_files import Box, Shape
from fivefold.fsdp.mesh import Mesh, Split
from fivefold.fsdp.packed_model import VALUE_HEAD, PackedModel


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
    files: tuple[FileTensor, ...] = ()

    @property
    def is_sharded(self) -> bool:
        return self.parameter is not None

    @property
    def is_apart(self) -> bool:
        """Whether tensor-parallel ranks hold different elements of it."""
        return self.split.dim is not None

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


def local_tensors(model: PackedModel, splits: Mapping[str, Split], mesh: Mesh, names: Iterable[str]) -> list[LocalTensor]:
    """Return the parameters and the buffers that belong to the files, in the order of the model.

    `names` are those of the tensors in the files.
    """
    parameters, buffers = list(_parameters(model, splits, mesh)), list(_buffers(model))
    shapes = {tensor.name: tensor.shape for tensor in (*parameters, *buffers)}
    files = tensors_in_files(model.model, shapes, names)
    return [replace(tensor, files=files[tensor.name]) for tensor in (*parameters, *buffers)]


def _parameters(model: PackedModel, splits: Mapping[str, Split], mesh: Mesh) -> Iterator[LocalTensor]:
    for full_name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{full_name} is not sharded"
        name, split, values = own_name(full_name), splits[full_name], parameter.to_local().detach()
        over, sharded = mesh.split_over(split), mesh.sharded_over(split)
        here = list(parameter.shape)
        shape, offset = list(here), [0] * len(here)
        if split.dim is not None:
            shape[split.dim] *= over.size()
            offset[split.dim] = over.rank() * here[split.dim]
        rows = -(-here[0] // sharded.size())
        begin = min(sharded.rank() * rows, here[0])
        size = (min(rows, here[0] - begin), *here[1:])
        offset[0] += begin
        assert tuple(values.shape) == size, f"{name}: FSDP holds {tuple(values.shape)} in place of {size}"
        yield LocalTensor(name, values, tuple(shape), Box(tuple(offset), size), split, parameter)


def _buffers(model: PackedModel) -> Iterator[LocalTensor]:
    lasting = set(model.state_dict(keep_vars=True)) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for full_name, buffer in model.named_buffers():
        if full_name in lasting:
            shape = tuple(buffer.shape)
            yield LocalTensor(own_name(full_name), buffer, shape, Box((0,) * len(shape), shape), Split(), None)


def own_name(name: str) -> str:
    """Return the name that transformers gives a parameter of PackedModel."""
    return VALUE_HEAD if name == VALUE_HEAD else name.removeprefix("model.")
