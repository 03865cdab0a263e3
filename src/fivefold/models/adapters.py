"""Low-rank adapters (LoRA, 2106.09685): target modules of a model and adapter tensors by PEFT's names. No torch here.

A linear layer W [out, in] of a Hugging Face model becomes W + alpha / rank · B A with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown
from fivefold.files import read_json_object
from fivefold.models.families import parameters_of
from fivefold.models.headers import Shape, read_headers
from fivefold.models.parameters import MappedParameter, Sharding
from fivefold.models.shapes import file_shapes
from fivefold.models.spec import ModelSpec

ALL = "all-linear"
"""Name for every linear layer in the decoder layers except routers; never the embedding or the output layer."""
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of the model."""
_MARK = "linear_"
"""Prefix of Megatron-Core's linear modules."""


@dataclass(frozen=True)
class LoraSpec:
    """Adapter settings of a model, from the section `lora`."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    exclude_modules: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear layer."""

    module: str
    """Name of the linear layer in Hugging Face: `model.layers.3.self_attn.q_proj`."""
    linear: str
    """Megatron-Core's module that computes it, possibly with others: `decoder.layers.3.self_attention.linear_qkv`, or for an
    expert `decoder.layers.3.mlp.experts.7.fc1`."""
    row: str
    """Row of the weight in the family's table."""
    sharding: Sharding
    """Sharding of that weight."""
    out: int
    into: int
    """Output and input size of the whole linear layer."""
    layer: int
    expert: int | None
    is_adapted: bool
    """False for a linear layer without an adapter that Megatron-Core computes together with one that has an adapter."""

    @property
    def name(self) -> str:
        """Name of the linear layer within its module: `q_proj`."""
        return self.module.rpartition(".")[2]

    @property
    def is_row_parallel(self) -> bool:
        """Whether tensor-parallel ranks shard its input, so A; otherwise they shard its output, so B, or nothing."""
        return self.sharding is Sharding.ROW

    def tensors(self, rank: int) -> tuple[tuple[MappedParameter, Shape], tuple[MappedParameter, Shape]]:
        """Return A and B with their shapes in the whole model."""
        is_whole = self.sharding is Sharding.REPLICATE
        of_b = Sharding.REPLICATE if is_whole or self.is_row_parallel else Sharding.COLUMN
        of_a = Sharding.ROW if self.is_row_parallel else Sharding.REPLICATE

        def mapped(name: str, sharding: Sharding) -> MappedParameter:
            parameter, row = (f"{where}.adapters.{self.name}.{name}" for where in (self.linear, self.row))
            hf = (f"{_PREFIX}{self.module}.{name}.weight",)
            return MappedParameter(parameter, hf, sharding, row, self.layer, self.expert)

        return (mapped("lora_A", of_a), (rank, self.into)), (mapped("lora_B", of_b), (self.out, rank))


@lru_cache(maxsize=64)
def adapters_of(spec: ModelSpec, lora: LoraSpec) -> tuple[Adapter, ...]:
    """Return the linear layers of each Megatron-Core module in which one has an adapter, by layers; raises ValueError for
    names that match none."""
    if spec.stored:
        raise UserError(f"rank must be 0 for {spec.family}: adapters need a family that has a file here")
    maps = _linear_maps(spec)
    for key, names in (("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)):
        known = sorted({module.rpartition(".")[2] for module, *_ in maps})
        for name in names:
            if name != ALL and not any(_fits(module, name) for module, *_ in maps):
                raise UserError(
                    f"{key} must name linear layers of the model's layers, by the end of their names: got {shown(name)}; "
                    f"{spec.family} has {', '.join(known)}"
                )
    adapters = []
    for module, parameter, shape in maps:
        wanted = any(_fits(module, name) for name in lora.target_modules)
        wanted = wanted and not any(_fits(module, name) for name in lora.exclude_modules)
        linear, layer = parameter.mcore.removesuffix(".weight"), parameter.layer
        assert layer is not None
        adapters.append(Adapter(module, linear, parameter.row, parameter.sharding, *shape, layer, parameter.expert, wanted))
    _check_experts(adapters)
    modules = {adapter.linear for adapter in adapters if adapter.is_adapted}
    if not modules:
        raise UserError("target_modules leaves nothing to train: exclude_modules excludes all of it")
    return tuple(adapter for adapter in adapters if adapter.linear in modules)


def _check_experts(adapters: list[Adapter]) -> None:
    """Raise ValueError if only some experts of a layer would have an adapter."""
    wanted: dict[tuple[int, str], set[bool]] = {}
    for adapter in adapters:
        if adapter.expert is not None:
            kinds = wanted.setdefault((adapter.layer, adapter.name), set())
            kinds.add(adapter.is_adapted)
            if len(kinds) > 1:
                raise UserError(
                    f"target_modules and exclude_modules must treat all experts of a layer alike: got {adapter.module} apart"
                )


def adapter_tensors(spec: ModelSpec, lora: LoraSpec) -> dict[MappedParameter, Shape]:
    """Return every adapter tensor with its shape in the whole model, in order of layers."""
    return {
        tensor: shape
        for adapter in adapters_of(spec, lora)
        if adapter.is_adapted
        for tensor, shape in adapter.tensors(lora.rank)
    }


def _linear_maps(spec: ModelSpec) -> list[tuple[str, MappedParameter, tuple[int, int]]]:
    """Return (name in Hugging Face, parameter that holds it, [out, in]) of every linear layer in the decoder layers."""
    maps = []
    for parameter in parameters_of(spec):
        is_linear = parameter.mcore.rpartition(".")[0].rpartition(".")[2].startswith(_MARK)
        if parameter.layer is None or not (is_linear or parameter.expert is not None):
            continue
        for name, shape in zip(parameter.hf, file_shapes(spec, parameter), strict=True):
            if name.endswith(".weight") and shape is not None and len(shape) == 2:
                maps.append((name.removesuffix(".weight"), parameter, (shape[0], shape[1])))
    return maps


def _fits(module: str, name: str) -> bool:
    """Whether a name matches a module as in PEFT: it is the module's name, or the end of it after a dot."""
    return name == ALL or module == name or module.endswith(f".{name}")


def peft_config(spec: ModelSpec, lora: LoraSpec, base: str) -> dict[str, Any]:
    """Return the `adapter_config.json` with which PEFT loads these adapters onto the model `base`."""
    adapted = [adapter for adapter in adapters_of(spec, lora) if adapter.is_adapted]
    names = {adapter.name for adapter in adapted}
    # Full names are needed if a short name would also match a linear layer without an adapter.
    is_plain = len(adapted) == sum(any(_fits(module, name) for name in names) for module, *_ in _linear_maps(spec))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        # Readers of this file expect an integer if the value is one.
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(names) if is_plain else [adapter.module for adapter in adapted],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
}
"""Keys of PEFT's configuration that change what an adapter computes, and the values with no effect."""


def check_adapter_files(directory: Path, spec: ModelSpec, lora: LoraSpec) -> None:
    """Raise ValueError if `directory` does not hold adapters of this model, rank and alpha in PEFT's format."""
    path, config = directory / TENSORS, read_json_object(directory / CONFIG)
    if not path.is_file():
        raise UserError(f"no {TENSORS} in {directory}; adapters in pickle files (*.bin) are not read")
    for key, values in _PLAIN.items():
        if (value := config.get(key, values[0])) not in values:
            raise UserError(
                f"{directory / CONFIG}: {key} must be {shown(values[0])}, other values are not supported: got {shown(value)}"
            )
    for key, ours, setting in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if config.get(key) != setting:
            raise UserError(f"lora.{ours} must be {key} of {directory / CONFIG}, {shown(config.get(key))}: got {setting:g}")
    headers, wanted = read_headers(path), {tensor.hf[0]: shape for tensor, shape in adapter_tensors(spec, lora).items()}
    if missing := sorted(set(wanted) - set(headers)):
        raise UserError(f"{path} lacks {len(missing)} tensors of lora.target_modules, the first: {missing[:2]}")
    if extra := sorted(set(headers) - set(wanted)):
        raise UserError(f"{path} has {len(extra)} tensors that lora.target_modules leaves out, the first: {extra[:2]}")
    for name, shape in wanted.items():
        if headers[name].shape != shape:
            raise UserError(f"{path}: {name} must have the shape {shape}: got {headers[name].shape}")
