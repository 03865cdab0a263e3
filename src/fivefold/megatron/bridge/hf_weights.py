"""Safetensors files -> the parameters of this rank, each rank reading only its own slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fivefold.layout import Coordinates, ParallelLayout
from fivefold.megatron.bridge.mapping import EMBEDDING, VALUE, mapped_names
from fivefold.megatron.bridge.sharding import Sliceable
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
        return set(VALUE.hf) <= set(self._files)

    def __getitem__(self, name: str) -> Sliceable:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self._directory / file, framework="pt")
        return self._open[file].get_slice(name)  # type: ignore[no-any-return]


def check_names(source: SafetensorsSource, shape: ModelSpec, directory: Path) -> None:
    """Raise ValueError where the files lack a tensor of the family or hold one that it does not have."""
    # A value head may be new.
    wanted = {name for item in mapped_names(shape) for name in item.hf} - set(VALUE.hf)
    # Some tied models store the shared weight a second time; a critic has no use for it.
    extra = {name for name in source.names - wanted if not _left_out(name, shape)} - {"lm_head.weight"}
    extra -= set(VALUE.hf) if shape.value_head else set()
    if missing := sorted(wanted - source.names):
        raise ValueError(f"{directory} lacks {len(missing)} tensors of a {shape.family} model, the first: {missing[:3]}")
    if extra:
        raise ValueError(
            f"{directory} holds {len(extra)} tensors that a {shape.family} model does not have, "
            f"the first: {sorted(extra)[:3]}"
        )


def _left_out(name: str, shape: ModelSpec) -> bool:
    """Buffers that are computed, and layers behind the last one (multi-token prediction), which are not trained."""
    parts = name.split(".")
    behind = name.startswith("model.layers.") and parts[2].isdigit() and int(parts[2]) >= shape.layers
    return behind or name.endswith(_NOT_PARAMETERS)


@torch.no_grad()
def load_parameters(
    parameters: dict[str, Tensor], source: SafetensorsSource, shape: ModelSpec, place: Coordinates, layout: ParallelLayout
) -> None:
    """Fill `parameters` (by Megatron-Core name, layers and experts counted over the whole model) from `source`."""
    filled = set()
    for item in mapped_names(shape):
        if item.mcore in parameters and item.hf == VALUE.hf and not source.has_value_head:
            parameters[item.mcore].zero_()
            filled.add(item.mcore)
        elif item.mcore in parameters:
            rank, size = (place.tp, layout.tp) if item.expert is None else (place.etp, layout.etp)
            _fill(
                parameters[item.mcore],
                item.sharding.shard([source[name] for name in item.hf], rank, size, shape),
                item.mcore,
            )
            filled.add(item.mcore)
    if shape.tied and (copy := parameters.get("output_layer.weight")) is not None:
        # The last stage of a pipeline keeps its own copy of the tied embedding.
        _fill(copy, EMBEDDING.sharding.shard([source[EMBEDDING.hf[0]]], place.tp, layout.tp, shape), "output_layer.weight")
        filled.add("output_layer.weight")
    left = sorted(set(parameters) - filled)
    assert not left, f"parameters that no row of the table fills: {left}"


def _fill(parameter: Tensor, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise ValueError(f"{name} must have the shape {tuple(parameter.shape)}: got {tuple(value.shape)} in the file")
    parameter.copy_(value)
