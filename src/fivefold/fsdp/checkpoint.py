"""Checkpoints that any layout can read: parameters, moments, schedule, by the names in the model's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.backend.checkpoint_names import CheckpointReader
from fivefold.backend.sharded_files import Piece
from fivefold.backend.shares import STATE, Share
from fivefold.fsdp.mesh import Mesh
from fivefold.fsdp.parameters import LocalTensor
from fivefold.fsdp.updater import Updater
from fivefold.models.spec import ModelSpec
from fivefold.summed_files import DamagedFile, read_part
from fivefold.tensors import check_finite

__all__ = ["DamagedFile", "load", "share_of"]


def share_of(tensors: list[LocalTensor], updater: Updater | None, mesh: Mesh) -> Share:
    """Return this rank's share of the parameters and, with an updater, of optimizer and schedule; its pieces are views."""
    state: dict[str, Any] | None = None
    if updater is not None and mesh.ranks.leads:
        state = {"step": updater.steps, "schedule": updater.schedule.state_dict()}
        if updater.loss_scale is not None:
            state["loss_scale"] = updater.loss_scale.state()
    return Share(mesh.ranks.rank, list(_pieces(tensors, updater, mesh)), state)


def _pieces(tensors: list[LocalTensor], updater: Updater | None, mesh: Mesh) -> Iterator[Piece]:
    for tensor in tensors:
        moments = updater.moments(tensor.name) if updater is not None and tensor.is_sharded else {}
        is_first = mesh.copies.rank() == 0 and (tensor.is_apart or mesh.tp.rank() == 0)
        is_first = is_first and (tensor.is_sharded or mesh.shard.rank() == 0)
        if not is_first or not tensor.values.numel():
            continue
        for kind, values in {"": tensor.values, **moments}.items():
            for file, box, view in tensor.pieces(values):
                yield Piece(f"{file.name}.{kind}".rstrip("."), box, view)


@torch.no_grad()
def load(path: Path, spec: ModelSpec, tensors: list[LocalTensor], updater: Updater | None) -> bool:
    """Read a checkpoint that was written on any layout; without an updater only the parameters.

    One of a `megatron:` layout needs a family with a table here.
    """
    reader = CheckpointReader(path, spec)
    for tensor in tensors:
        _fill(reader, "", tensor, tensor.values)
        check_finite(tensor.name, tensor.values, str(path))
    if updater is None:
        return False
    state = json.loads(read_part(path / STATE))
    for tensor in tensors:
        for kind, values in updater.moments(tensor.name).items() if tensor.is_sharded else ():
            _fill(reader, kind, tensor, values)
    updater.set_steps(state["step"])
    updater.schedule.load_state_dict(state["schedule"])
    if updater.loss_scale is not None and "loss_scale" in state:
        updater.loss_scale.load_state(state["loss_scale"])
    return False


def _fill(reader: CheckpointReader, kind: str, tensor: LocalTensor, values: Tensor) -> None:
    for file, box, view in tensor.pieces(values):
        read = torch.empty(view.shape, dtype=view.dtype)
        reader.fill(f"{file.name}.{kind}".rstrip("."), box, read)
        view.copy_(read)
