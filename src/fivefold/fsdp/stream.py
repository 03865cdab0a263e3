"""The sharded model -> (name in the files, full tensor), layer by layer, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.backend.file_names import FileTensor
from fivefold.errors import RunError
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.packed_model import PackedModel, fsdp_modules
from fivefold.fsdp.parameters import LocalTensor, own_name


@torch.no_grad()
def stream_weights(model: PackedModel, tensors: list[LocalTensor], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, which keep their values afterwards; collective: every rank must iterate to the end.

    FSDP gathers a layer in the dtype of computation, all its parameters at once; experts that are divided over ranks follow
    a few at a time.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    names = {id(module): name for name, module in model.named_modules()}
    units = {names[id(unit)]: unit for unit in fsdp_modules(model)}
    for prefix, unit in units.items():
        inner = tuple(f"{other}." for other in units if other and other != prefix and f"{other}.".startswith(prefix))
        unit.unshard()
        try:
            for name, parameter in unit.named_parameters():
                full = f"{prefix}.{name}" if prefix else name
                if not full.startswith(inner):
                    yield from _whole(parameter.detach(), by_name[own_name(full)], mesh)
        finally:
            unit.reshard()
    for tensor in tensors:
        if not tensor.is_sharded:
            yield tensor.files[0].name, tensor.values


def checked(weights: Iterable[tuple[str, Tensor]], tensors: Iterable[LocalTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; raises RunError unless they are the tensors of the files, each once and in its shape.

    Ranks stream the same tensors, so all of them raise. The files' own headers are compared when they are read.
    """
    missing = {file.name: file.shape for tensor in tensors for file in tensor.files}
    for name, values in weights:
        if missing.pop(name, None) != tuple(values.shape):
            raise RunError(
                f"streamed weights must be the tensors of the model's files, each once: got {name} {[*values.shape]}"
            )
        yield name, values
    if missing:
        names = ", ".join(sorted(missing)[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise RunError(f"streamed weights must be the tensors of the model's files: they lack {names}")


def _whole(values: Tensor, tensor: LocalTensor, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the files in a parameter of which this rank has its part of the split."""
    dim, over = tensor.split.dim, mesh.split_over(tensor.split)
    if dim is None:
        # The memory that FSDP gathers into is freed after the layer, and an engine may load a tensor later than that.
        yield from ((file.name, file.of(values).clone()) for file in tensor.files)
    elif tensor.files[0].expert is None:
        whole = torch.cat(list(_gathered(values, over)), dim)
        yield from ((file.name, file.of(whole)) for file in tensor.files)
    else:
        by_expert: dict[int, list[FileTensor]] = {}
        for file in tensor.files:
            assert file.expert is not None
            by_expert.setdefault(file.expert, []).append(file)
        for place, held in enumerate(values):
            for rank, expert in enumerate(_gathered(held, over)):
                for file in by_expert[rank * len(values) + place]:
                    yield file.name, replace(file, expert=0).of(expert[None])


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, stacked."""
    gathered = values.new_empty(group.size(), *values.shape)
    dist.all_gather_into_tensor(gathered.view(-1, *values.shape[1:]), values.contiguous(), group=group)
    return gathered
