"""Tensors by their Hugging Face names -> the parameters of this rank, each rank reading only its own slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from fivefold.layout import Coordinates, ParallelLayout
from fivefold.megatron.bridge.sharding import SHARDERS, Sliceable
from fivefold.models.families import parameters_of
from fivefold.models.parameters import EMBEDDING, OUTPUT, VALUE_HEAD
from fivefold.models.spec import ModelSpec
from fivefold.models.tensor_files import tensor_places


class Source(Protocol):
    """Tensors of a model by their names in Hugging Face files."""

    @property
    def has_value_head(self) -> bool: ...

    def __getitem__(self, name: str) -> Sliceable: ...


class SafetensorsSource:
    """Tensors of a Hugging Face directory by name, in one file or many, read slice by slice."""

    def __init__(self, directory: Path) -> None:
        self._files = tensor_places(directory)
        self._directory = directory
        self._open: dict[str, Any] = {}

    @property
    def has_value_head(self) -> bool:
        return set(VALUE_HEAD.hf) <= set(self._files)

    def __getitem__(self, name: str) -> Sliceable:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self._directory / file, framework="pt")
        return self._open[file].get_slice(name)  # type: ignore[no-any-return]


@torch.no_grad()
def load_parameters(
    parameters: dict[str, Tensor], source: Source, spec: ModelSpec, place: Coordinates, layout: ParallelLayout
) -> None:
    """Fill `parameters` (by Megatron-Core name, layers and experts counted over the whole model) from `source`."""
    filled = set()
    for item in parameters_of(spec):
        if (parameter := parameters.get(item.mcore)) is None:
            continue
        if item.hf == VALUE_HEAD.hf and not source.has_value_head:
            parameter.zero_()
        else:
            rank, size = (place.tp, layout.tp) if item.expert is None else (place.etp, layout.etp)
            full = [source[name] for name in item.hf]
            _fill(parameter, SHARDERS[item.sharding].shard(full, rank, size, spec), item.mcore)
        filled.add(item.mcore)
    if spec.tied and (copy := parameters.get(OUTPUT.mcore)) is not None:
        # The last stage of a pipeline keeps its own copy of the tied embedding.
        full = [source[name] for name in EMBEDDING.hf]
        _fill(copy, SHARDERS[EMBEDDING.sharding].shard(full, place.tp, layout.tp, spec), OUTPUT.mcore)
        filled.add(OUTPUT.mcore)
    left = sorted(set(parameters) - filled)
    assert not left, f"parameters that no row of the table fills: {left}"


def _fill(parameter: Tensor, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise ValueError(f"{name} must have the shape {tuple(parameter.shape)}: got {tuple(value.shape)} in the file")
    parameter.copy_(value)
