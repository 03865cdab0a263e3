"""Weights that are read are finite numbers."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.layout import Coordinates, ParallelLayout
from fivefold.megatron.bridge import SafetensorsSource
from fivefold.megatron.bridge.hf_weights import fill_parameters
from fivefold.models.families import load_spec, parameters_of
from fivefold.tensors import check_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_weight_that_is_not_finite_is_named_by_its_tensor_when_it_is_read(models, tmp_path, name, bad):
    directory = models("qwen3")
    spec = load_spec(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[-1] = bad
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path, spec)
    place = Coordinates(*(0 for _ in Coordinates.__dataclass_fields__))
    item = next(item for item in parameters_of(spec) if name in item.hf)
    parameters = {item.mcore: torch.empty(_shape(source, item, spec))}
    kind = "1 NaN and 0 infinite" if math.isnan(bad) else "0 NaN and 1 infinite"
    with pytest.raises(ValueError, match=rf"every weight must be a finite number: .*{name}.* holds {kind} ones"):
        fill_parameters(parameters, source, [item], spec, place, ParallelLayout())


def _shape(source, item, spec):
    from fivefold.megatron.bridge.sharding import SHARDERS

    return SHARDERS[item.sharding].shard([source[name] for name in item.hf], 0, 1, spec).shape


def test_finite_numbers_of_every_type_pass():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        check_finite("w", torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0], dtype=dtype), "a file")
    check_finite("w", torch.tensor([3]), "a file")
    check_finite("w", torch.empty(0), "a file")
