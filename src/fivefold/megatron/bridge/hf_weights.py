"""Safetensors files -> the parameters of this rank, each rank reading only its own slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fivefold.layout import Coordinates, ParallelLayout
from fivefold.megatron.bridge.sharding import SHARDERS, Sliceable
from fivefold.models.families import parameters_of
from fivefold.models.parameters import EMBEDDING, OUTPUT, VALUE_HEAD
from fivefold.models.spec import ModelSpec

_NOT_PARAMETERS = ("rotary_emb.inv_freq",)


class SafetensorsSource:
    """Tensors of a Hugging Face directory by name, in one file or many, read slice by slice."""

    def __init__(self, directory: Path) -> None:
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single.name)
        else:
            raise ValueError(
                f"no model.safetensors or model.safetensors.index.json in {directory}; "
                "weights in pickle files (*.bin) are not read: convert them to safetensors first"
            )
        self._directory = directory
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> set[str]:
        return set(self._files)

    @property
    def has_value_head(self) -> bool:
        return set(VALUE_HEAD.hf) <= set(self._files)

    def __getitem__(self, name: str) -> Sliceable:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self._directory / file, framework="pt")
        return self._open[file].get_slice(name)  # type: ignore[no-any-return]


def check_names(source: SafetensorsSource, spec: ModelSpec, directory: Path) -> None:
    """Raise ValueError where the files lack a tensor of the family or hold one that it does not have."""
    # A value head may be new.
    wanted = {name for item in parameters_of(spec) for name in item.hf} - set(VALUE_HEAD.hf)
    # Some tied models store the shared weight a second time; a critic has no use for it.
    extra = {name for name in source.names - wanted if not _left_out(name, spec)} - set(OUTPUT.hf)
    extra -= set(VALUE_HEAD.hf) if spec.value_head else set()
    if missing := sorted(wanted - source.names):
        raise ValueError(f"{directory} lacks {len(missing)} tensors of a {spec.family} model, the first: {missing[:3]}")
    if extra:
        raise ValueError(
            f"{directory} holds {len(extra)} tensors that a {spec.family} model does not have, "
            f"the first: {sorted(extra)[:3]}"
        )


def _left_out(name: str, spec: ModelSpec) -> bool:
    """Buffers that are computed, and layers behind the last one (multi-token prediction), which are not trained."""
    parts = name.split(".")
    behind = name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) >= spec.layers
    return behind or name.endswith(_NOT_PARAMETERS)


@torch.no_grad()
def load_parameters(
    parameters: dict[str, Tensor], source: SafetensorsSource, spec: ModelSpec, place: Coordinates, layout: ParallelLayout
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
