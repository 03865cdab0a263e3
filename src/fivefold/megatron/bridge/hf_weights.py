"""Tensors by their Hugging Face names -> the parameters of this rank, each rank reading only its own slices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from fivefold.errors import UserError
from fivefold.layout import Coordinates, ParallelLayout
from fivefold.megatron.bridge.sharding import SHARDERS, Sliceable
from fivefold.models.adapters import TENSORS, LoraSpec, adapter_tensors
from fivefold.models.families import is_of_mtp, mtp_parameters_of, parameters_of
from fivefold.models.headers import Shape, read_headers, tensor_places
from fivefold.models.parameters import EMBEDDING, OUTPUT, VALUE_HEAD, MappedParameter
from fivefold.models.spec import ModelSpec
from fivefold.tensors import check_finite


class Source(Protocol):
    """Tensors of a model by their names in Hugging Face files."""

    @property
    def has_value_head(self) -> bool: ...

    @property
    def mtp_names(self) -> list[str]: ...

    def __getitem__(self, name: str) -> Sliceable: ...


class SafetensorsSource:
    """Tensors of a Hugging Face directory by name, in one file or many, read slice by slice."""

    def __init__(self, directory: Path, spec: ModelSpec, files: Mapping[str, str] | None = None) -> None:
        """Read tensors of `directory`; `files` maps the tensors to read to their files (default: all tensors)."""
        self._files = tensor_places(directory) if files is None else files
        self._directory, self._spec = directory, spec
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    @property
    def has_value_head(self) -> bool:
        return set(VALUE_HEAD.hf) <= set(self._files)

    @property
    def mtp_names(self) -> list[str]:
        """Names of the tensors of multi-token prediction layers, including those that they share with the model."""
        return [name for name in self._files if is_of_mtp(name, self._spec)]

    def __getitem__(self, name: str) -> Sliceable:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self._directory / file, framework="pt")
        return self._open[file].get_slice(name)  # type: ignore[no-any-return]


class DrawnAdapters:
    """Newly drawn adapters: A is random, B is 0.

    A is uniform in ±1/sqrt(in), as PEFT draws it (Kaiming, 1502.01852, with a = sqrt 5), or normal with the variance 2 / (in
    + rank), as Megatron-Bridge does (Xavier, Glorot & Bengio 2010, eq. 12). Every A is drawn whole from the seed and its
    name, so it is the same on every layout.
    """

    has_value_head = False
    mtp_names: ClassVar[list[str]] = []

    def __init__(self, shapes: Mapping[str, Shape], init: str, seed: int) -> None:
        self._shapes, self._init, self._seed = shapes, init, seed

    def __getitem__(self, name: str) -> Sliceable:
        shape = self._shapes[name]
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape)
        number = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8], "little", signed=True)
        generator, (rank, into) = torch.Generator().manual_seed(number), shape
        if self._init == "xavier":
            return torch.randn(shape, generator=generator).mul_(math.sqrt(2 / (into + rank)))
        return torch.empty(shape).uniform_(-(into**-0.5), into**-0.5, generator=generator)


def load_adapters(
    parameters: dict[str, Tensor],
    directory: Path | None,
    init: str,
    seed: int,
    spec: ModelSpec,
    lora: LoraSpec,
    place: Coordinates,
    layout: ParallelLayout,
) -> None:
    """Fill adapters from those that PEFT wrote into `directory`, or with new ones, drawn as `init` specifies."""
    tensors = adapter_tensors(spec, lora)
    drawn = DrawnAdapters({item.hf[0]: shape for item, shape in tensors.items()}, init, seed)
    source: Source = drawn
    if directory is not None:
        source = SafetensorsSource(directory, spec, dict.fromkeys(read_headers(directory / TENSORS), TENSORS))
    fill_parameters(parameters, source, tensors, spec, place, layout)


@torch.no_grad()
def load_parameters(
    parameters: dict[str, Tensor], source: Source, spec: ModelSpec, place: Coordinates, layout: ParallelLayout
) -> None:
    """Fill `parameters` (by Megatron-Core name, layers and experts counted over the whole model) from `source`."""
    filled = fill_parameters(parameters, source, parameters_of(spec) + mtp_parameters_of(spec), spec, place, layout)
    if spec.tied and (copy := parameters.get(OUTPUT.mcore)) is not None:
        # The last stage of a pipeline keeps its own copy of the tied embedding.
        full = [source[name] for name in EMBEDDING.hf]
        _fill(copy, SHARDERS[EMBEDDING.sharding].shard(full, place.tp, layout.tp, spec), OUTPUT.mcore, EMBEDDING.hf)
        filled.add(OUTPUT.mcore)
    left = sorted(set(parameters) - filled)
    assert not left, f"parameters that no row of the table fills: {left}"


@torch.no_grad()
def fill_parameters(
    parameters: dict[str, Tensor],
    source: Source,
    items: Iterable[MappedParameter],
    spec: ModelSpec,
    place: Coordinates,
    layout: ParallelLayout,
) -> set[str]:
    """Fill those of `parameters` that are among `items`; return their names."""
    filled = set()
    for item in items:
        if (parameter := parameters.get(item.mcore)) is None:
            continue
        if item.hf == VALUE_HEAD.hf and not source.has_value_head:
            parameter.zero_()
        else:
            rank, size = (place.tp, layout.tp) if item.expert is None else (place.etp, layout.etp)
            full = [source[name] for name in item.hf]
            _fill(parameter, SHARDERS[item.sharding].shard(full, rank, size, spec), item.mcore, item.hf)
        filled.add(item.mcore)
    return filled


def _fill(parameter: Tensor, value: Tensor, name: str, names: Sequence[str]) -> None:
    """Copy `value`, read from the tensors `names` of the files, into the parameter `name`."""
    if parameter.shape != value.shape:
        raise UserError(f"{name} must have the shape {tuple(parameter.shape)}: got {tuple(value.shape)} in the file")
    check_finite(", ".join(names), value, "the model's files")
    parameter.copy_(value)
