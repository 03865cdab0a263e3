"""Checkpoints that any layout can read: parameters, moments, schedule. Each rank holds and writes only its share.

Names and shapes are those of Megatron-Core's `sharded_state_dict`, which describe the whole model, whatever the layout. If
several ranks hold the same tensor, each data-parallel rank writes a part of it. Moments are divided over these ranks
already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from fivefold.backend.checkpoint_names import MASTER, MOMENTS, PREFIX, CheckpointReader
from fivefold.backend.sharded_files import Box, Piece, PieceReader, boxes_of_range
from fivefold.backend.shares import STATE, Share
from fivefold.distributed.objects import all_gather_json
from fivefold.megatron.layers.layer_spec import PolicyModel
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.optim.adam import initial_state
from fivefold.megatron.optim.updater import Updater
from fivefold.megatron.replica_check import verify_copies
from fivefold.models.spec import ModelSpec
from fivefold.summed_files import DamagedFile, read_part
from fivefold.tensors import check_finite


def share_of(chunks: list[PolicyModel], updater: Updater | None, mesh: Mesh) -> Share:
    """Return this rank's share of the parameters and, with an updater, of optimizer and schedule; its pieces are views."""
    pieces, state = list(_weights(chunks, mesh)), None
    if updater is not None:
        _ensure_moments(updater)
        pieces += _optimizer_state(chunks, updater, mesh)
        if mesh.ranks.leads:
            state = {"step": _step(updater), "schedule": updater.schedule.state_dict()}
            if updater.loss_scale is not None:
                state["loss_scale"] = updater.loss_scale.state()
    return Share(mesh.ranks.rank, pieces, state)


def load(path: Path, spec: ModelSpec, chunks: list[PolicyModel], updater: Updater | None, mesh: Mesh) -> None:
    """Read a checkpoint that was written on any layout; without an updater only the parameters.

    Raises DamagedFile on all ranks of the model if one of them reads other bytes than were written. Collective.
    """
    fault = ""
    try:
        _read(path, spec, chunks, updater, mesh)
    except DamagedFile as error:
        fault = str(error)
    faults = all_gather_json(fault, mesh.ranks.members)
    if any(faults):
        raise DamagedFile(next(filter(None, faults)))
    # Loading does not guarantee that copies are equal.
    verify_copies(chunks, mesh)


def _read(path: Path, spec: ModelSpec, chunks: list[PolicyModel], updater: Updater | None, mesh: Mesh) -> None:
    reader = CheckpointReader(path, spec)
    for chunk in chunks:
        for tensor in _tensors(chunk, mesh):
            tensor.read(reader, tensor.name, 0, tensor.data.numel(), tensor.data)
            check_finite(tensor.name, tensor.data, str(path))
    if updater is not None:
        _ensure_moments(updater)
        state = json.loads(read_part(path / STATE))
        _load_optimizer(reader, chunks, updater, mesh, state["step"])
        updater.schedule.load_state_dict(state["schedule"])
        if updater.loss_scale is not None and "loss_scale" in state:
            updater.loss_scale.load_state(state["loss_scale"])


@dataclass(frozen=True)
class _LocalTensor:
    """A parameter or buffer of this rank, and the location of its elements in the whole model."""

    name: str
    data: Tensor
    parts: list[tuple[int, int, str, Box]]
    """[begin, end) of the elements in row-major order, with name and box of the stored tensor that they belong to."""
    copy: int
    """Index among the data-parallel ranks that hold the same elements."""
    copies: int
    is_first: bool
    """This rank writes for other ranks with the same elements (tied embeddings, norms on tensor-parallel ranks)."""

    def pieces(self, kind: str, begin: int, end: int, values: Tensor) -> Iterator[Piece]:
        """Yield the pieces of elements [begin, end); `values` are the weights or another kind of state of the parameter."""
        flat = values.detach().reshape(-1)
        for name, box, first, count in self._boxes(kind, begin, end):
            yield Piece(name, box, flat[first - begin : first - begin + count].view(box.size))

    def read(self, reader: PieceReader, kind: str, begin: int, end: int, values: Tensor) -> None:
        """Fill `values` with elements [begin, end)."""
        flat = torch.empty(end - begin, dtype=values.dtype)
        for name, box, first, count in self._boxes(kind, begin, end):
            reader.fill(name, box, flat[first - begin : first - begin + count].view(box.size))
        values.detach().copy_(flat.view(values.shape))

    def _boxes(self, kind: str, begin: int, end: int) -> Iterator[tuple[str, Box, int, int]]:
        for first, last, name, outer in self.parts:
            key = f"{name}.{kind}" if kind != self.name else name
            shape = outer.size
            for box, place in boxes_of_range(shape, max(begin, first) - first, min(end, last) - first):
                placed = Box(tuple(a + b for a, b in zip(outer.offset, box.offset, strict=True)), box.size)
                yield key, placed, first + place, int(torch.Size(box.size).numel())

    @property
    def share(self) -> tuple[int, int]:
        """[begin, end) that this rank writes of the elements that all its data-parallel ranks hold."""
        count = self.data.numel()
        return count * self.copy // self.copies, count * (self.copy + 1) // self.copies


def _tensors(chunk: PolicyModel, mesh: Mesh) -> Iterator[_LocalTensor]:
    """Yield the tensors of a chunk with the locations that Megatron-Core reports.

    Megatron-Core splits some tensors in several (gate and up of a feed-forward layer). For a model with adapters, only the
    trained tensors are included: the others are those of the model that the run started from.
    """
    for name, sharded in chunk.sharded_state_dict(prefix=PREFIX, metadata={"dp_cp_group": mesh.dp}).items():
        if not chunk.is_trained(name.removeprefix(PREFIX)):
            continue
        if isinstance(sharded, ShardedTensorFactory):
            cuts = list(nested_values(sharded.build_fn(sharded.key, sharded.data, sharded.replica_id, None)))
        elif isinstance(sharded, ShardedTensor):
            cuts = [sharded]
        else:
            continue
        parts, begin = [], 0
        for cut in cuts:
            if cut is not sharded:
                # A view: the address where it begins gives the elements that it holds.
                begin = (cut.data.data_ptr() - sharded.data.data_ptr()) // sharded.data.element_size()
                assert cut.data.is_contiguous() and 0 <= begin <= sharded.data.numel() - cut.data.numel(), name
            size = (*(1 for _ in range(cut.prepend_axis_num)), *cut.local_shape)
            parts.append((begin, begin + cut.data.numel(), cut.key, Box(tuple(cut.global_offset), size)))
        *others, copy = cuts[0].replica_id
        group = mesh.dp if getattr(sharded.data, "allreduce", True) else mesh.expert_dp
        assert copy == group.rank(), f"{name}: copy {copy} on data-parallel rank {group.rank()}"
        yield _LocalTensor(name, sharded.data, parts, copy, group.size(), not any(others))


def _weights(chunks: list[PolicyModel], mesh: Mesh) -> Iterator[Piece]:
    for chunk in chunks:
        for tensor in _tensors(chunk, mesh):
            if tensor.is_first:
                begin, end = tensor.share
                yield from tensor.pieces(tensor.name, begin, end, tensor.data.detach().reshape(-1)[begin:end])


@dataclass(frozen=True)
class _Moments:
    """The optimizer's state of one parameter on this rank."""

    adam: Any
    key: Tensor
    """Tensor under which the optimizer stores this state."""
    begin: int
    end: int
    """[begin, end) of the parameter's elements whose state is on this rank."""
    is_divided: bool
    """The state is divided over the data-parallel ranks; otherwise each of them has all of it."""

    def kinds(self, has_master: bool) -> dict[str, Tensor]:
        """Return the state's tensors by name."""
        state = self.adam.state[self.key]
        masters = {MASTER: state.get("master_param", self.key)} if has_master else {}
        return masters | {name: state[name] for name in MOMENTS}


def _moments(updater: Updater) -> dict[Tensor, _Moments]:
    """Return the optimizer's state of each parameter of the model."""
    moments = {}
    for outer in _adams(updater):
        adam = outer.optimizer
        if isinstance(outer, DistributedOptimizer):
            for parameter, (group, order) in outer.model_param_group_index_map.items():
                place = outer._get_model_param_range_map(parameter)["param"]
                key = adam.param_groups[group]["params"][order]
                moments[parameter] = _Moments(adam, key, place.start, place.end, True)
        else:
            for group in outer.param_groups:
                for key in group["params"]:
                    moments[key] = _Moments(adam, key, 0, key.numel(), False)
            for model_group, main_group in zip(
                getattr(outer, "float16_groups", ()), getattr(outer, "fp32_from_float16_groups", ()), strict=True
            ):
                for parameter, key in zip(model_group, main_group, strict=True):
                    moments[parameter] = _Moments(adam, key, 0, parameter.numel(), False)
    return moments


def _states(chunks: list[PolicyModel], updater: Updater, mesh: Mesh) -> Iterator[tuple[_LocalTensor, _Moments]]:
    moments = _moments(updater)
    for chunk in chunks:
        for tensor in _tensors(chunk, mesh):
            if tensor.data in moments:
                yield tensor, moments[tensor.data]


def _optimizer_state(chunks: list[PolicyModel], updater: Updater, mesh: Mesh) -> Iterator[Piece]:
    for tensor, moments in _states(chunks, updater, mesh):
        if not tensor.is_first:
            continue
        begin, end = (moments.begin, moments.end) if moments.is_divided else tensor.share
        for kind, values in moments.kinds(_has_master(tensor)).items():
            share = values.detach().reshape(-1)[begin - moments.begin : end - moments.begin]
            yield from tensor.pieces(kind, begin, end, share)


def _has_master(tensor: _LocalTensor) -> bool:
    """Whether the optimizer keeps a float32 copy: a float32 parameter needs none."""
    return tensor.data.dtype != torch.float32


def _load_optimizer(reader: PieceReader, chunks: list[PolicyModel], updater: Updater, mesh: Mesh, step: float) -> None:
    """Load moments and step counts; learning rates and other settings come from this run's configuration."""
    for tensor, moments in _states(chunks, updater, mesh):
        for kind, values in moments.kinds(_has_master(tensor)).items():
            tensor.read(reader, kind, moments.begin, moments.end, values)
        if not _has_master(tensor) and moments.key is not tensor.data:
            moments.key.detach().copy_(tensor.data.detach().reshape(-1)[moments.begin : moments.end])
        # One step tensor per parameter: torch's foreach Adam would increment a shared one once per parameter.
        state = moments.adam.state[moments.key]
        state["step"] = torch.full_like(state["step"], step)


def _step(updater: Updater) -> float:
    """Return the number of updates that Adam has counted, which is the same for every parameter."""
    counted = {float(state["step"]) for outer in _adams(updater) for state in outer.optimizer.state.values()}
    assert len(counted) <= 1, f"parameters differ in their updates: {sorted(counted)}"
    # With adapters, a stage that holds only the embedding trains nothing.
    return counted.pop() if counted else float(updater.schedule.num_steps)


def _adams(updater: Updater) -> list[Any]:
    """Return Megatron-Core's optimizers, each around one torch Adam: for dense parameters and for experts."""
    return [outer for outer in updater.optimizer.chained_optimizers if not outer.is_stub_optimizer]


def _ensure_moments(updater: Updater) -> None:
    """Initialize Adam's state, which torch creates only in the first step: step 0, zero moments."""
    for outer in _adams(updater):
        adam = outer.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = initial_state(adam, parameter)
