"""Layers of multi-token prediction in a model's files: named by the families, left out of the model, never lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from fivefold.layout import ParallelLayout
from fivefold.models.families import is_of_mtp, load_spec, mtp_copies, mtp_parameters_of, parameters_of
from fivefold.models.shapes import file_shapes
from fivefold.models.tensor_files import check_tensor_files, find_mtp_tensors
from fivefold.plan.memory import rank_parameters
from tests.support.tiny_models import MTP_VARIANTS, load_tensors


@pytest.mark.parametrize("name", list(MTP_VARIANTS))
def test_the_table_names_every_tensor_of_the_layers_once_with_its_shape(models, name):
    spec, files = load_spec(models(name)), load_tensors(models(name))
    assert spec.mtp_layers == MTP_VARIANTS[name][1]
    model = [hf for parameter in parameters_of(spec) for hf in parameter.hf]
    ahead = [hf for parameter in mtp_parameters_of(spec) for hf in parameter.hf]
    assert sorted([*model, *ahead, *mtp_copies(spec)]) == sorted(files)
    assert {hf for hf in files if is_of_mtp(hf, spec)} == {*ahead, *mtp_copies(spec)}
    for parameter in mtp_parameters_of(spec):
        for hf, shape in zip(parameter.hf, file_shapes(spec, parameter), strict=True):
            assert files[hf].shape == shape, hf


def test_the_names_are_those_of_the_published_files(models):
    """DeepSeek-V3's 61 layers are 0 to 60 and its 62nd predicts a further token; MiMo-7B's names count from 0."""
    deepseek = load_spec(models("deepseek_v3_mtp"))
    large = replace(deepseek, layers=61, moe=replace(deepseek.moe, layers=(False, False, False, *[True] * 58)))
    names = {hf for parameter in mtp_parameters_of(large) for hf in parameter.hf} | set(mtp_copies(large))
    assert {
        "model.layers.61.enorm.weight",
        "model.layers.61.hnorm.weight",
        "model.layers.61.eh_proj.weight",
        "model.layers.61.shared_head.norm.weight",
        "model.layers.61.shared_head.head.weight",
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.mlp.gate.e_score_correction_bias",
        "model.layers.61.mlp.experts.7.down_proj.weight",
        "model.layers.61.self_attn.kv_a_proj_with_mqa.weight",
    } <= names
    names = {hf for parameter in mtp_parameters_of(load_spec(models("mimo"))) for hf in parameter.hf}
    assert {
        "model.mtp_layers.0.input_layernorm.weight",
        "model.mtp_layers.0.token_layernorm.weight",
        "model.mtp_layers.0.hidden_layernorm.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.final_layernorm.weight",
        "model.mtp_layers.0.self_attn.q_proj.bias",
        "model.mtp_layers.0.mlp.gate_proj.weight",
    } <= names


@pytest.mark.parametrize("name", list(MTP_VARIANTS))
def test_files_with_the_layers_are_those_of_the_model_whether_all_are_there_or_none(models, tmp_path, name):
    spec = load_spec(models(name))
    check_tensor_files(models(name), spec)
    assert set(find_mtp_tensors(models(name), spec)) == {hf for hf in load_tensors(models(name)) if is_of_mtp(hf, spec)}
    (tmp_path / "config.json").write_bytes((models(name) / "config.json").read_bytes())
    left = {hf: tensor for hf, tensor in load_tensors(models(name)).items() if not is_of_mtp(hf, spec)}
    save_file(left, tmp_path / "model.safetensors")
    check_tensor_files(tmp_path, spec)
    save_file(left | {"model.layers.9.enorm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds 1 tensors that a .* does not have"):
        check_tensor_files(tmp_path, spec)


@pytest.mark.parametrize("name", list(MTP_VARIANTS))
def test_their_memory_is_planned_where_they_are_trained(models, name):
    """Every number of them on the last stage, and with a pipeline the copy of the embedding."""
    spec, files = load_spec(models(name)), load_tensors(models(name))
    names = [hf for parameter in mtp_parameters_of(spec) for hf in parameter.hf if "e_score_correction_bias" not in hf]
    numbers = sum(files[hf].numel() for hf in names)
    for layout, copy in (("megatron:d1", 0), ("megatron:p2", spec.padded_vocab * spec.hidden)):
        without, trained = (rank_parameters(spec, ParallelLayout.parse(layout), None, mtp) for mtp in (0, spec.mtp_layers))
        assert [one.total - other.total for one, other in zip(trained, without, strict=True)][-1] == numbers + copy
        assert trained[:-1] == without[:-1]
