"""No key of a model's files that changes numbers is ignored: what transformers computes is computed, or it is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.models.config_json import read_config
from fivefold.models.config_keys import NEUTRAL, WITHOUT_EFFECT
from fivefold.models.families import FAMILIES, load_spec, spec_from_config, unread_keys
from fivefold.models.tensor_files import check_tensor_files
from tests.models.test_families import ALL, QWEN3


def changed(directory: Path, tmp_path: Path, **keys) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    config = read_config(copy) | keys
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return copy


@torch.no_grad()
def transformers_logits(directory: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model(torch.arange(3, 60).unsqueeze(0)).logits


@pytest.mark.parametrize("name", ALL)
def test_every_key_that_transformers_has_is_read_or_has_a_reason(models, name):
    import transformers

    directory = models(name)
    family = read_config(directory)["model_type"]
    known_as = FAMILIES[family].known_as
    fields = transformers.AutoConfig.for_model(known_as[0] if known_as else family).to_dict()
    config = fields | read_config(directory)
    assert not set(WITHOUT_EFFECT) & set(NEUTRAL)
    (directory / "config.json").rename(directory / "kept.json")
    try:
        (directory / "config.json").write_text(json.dumps(config))
        assert unread_keys(directory) == []
    finally:
        (directory / "kept.json").replace(directory / "config.json")


@pytest.mark.parametrize("name", ALL)
def test_a_key_that_is_left_out_has_the_value_that_transformers_gives_it(models, name):
    import transformers

    config = read_config(models(name))
    if config["model_type"] not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip("transformers has no name for it")
    compared = 0
    # Latent attention has as many keys and values as queries, whatever this says.
    unused = {"num_key_value_heads"} if "kv_lora_rank" in config else set()
    for key in config.keys() - unused:
        less = {other: value for other, value in config.items() if other != key}
        try:
            ours = spec_from_config(less)
        except ValueError:
            continue
        kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[config["model_type"]]
        filled = kind.from_dict(less).to_dict()
        try:
            theirs = spec_from_config(json.loads(json.dumps(filled)))
        except ValueError as error:
            raise AssertionError(f"{name} without {key} is accepted, and with the value of transformers: {error}") from error
        # Layers of multi-token prediction are no part of what transformers computes.
        assert ours == replace(theirs, mtp_layers=ours.mtp_layers), key
        compared += 1
    assert compared > 10


ROPE = {"rope_type": "linear", "factor": 4.0}


def test_rope_scaling_next_to_rope_parameters_is_refused_where_they_differ(models, tmp_path):
    directory = models("llama")
    parameters = read_config(directory)["rope_parameters"]
    copy = changed(directory, tmp_path, rope_scaling=ROPE)
    assert (transformers_logits(copy) - transformers_logits(directory)).abs().max() > 1e-3, "transformers takes it"
    with pytest.raises(ValueError, match=r"rope_scaling and rope_parameters in config.json must say the same"):
        load_spec(copy)
    for same in (
        parameters,
        {"type": "default"} | {key: value for key, value in parameters.items() if key != "rope_type"},
        {},
        None,
    ):
        (copy / "config.json").write_text(json.dumps(read_config(copy) | {"rope_scaling": same}))
        assert load_spec(copy) == load_spec(directory)


def test_rope_that_differs_between_kinds_of_layers_is_refused():
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    with pytest.raises(ValueError, match="must be the same for all layers: got"):
        spec_from_config(QWEN3 | {"rope_parameters": rope})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}),
        ("qwen3", {"layer_types": ["full_attention"] * 3}),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}),
        ("llama", {"layer_types": ["sliding_attention"] * 4}),
        ("mistral", {"layer_types": ["full_attention"] * 4, "sliding_window": 8}),
    ],
)
def test_layer_types_that_are_not_computed_are_refused(family, change):
    config = QWEN3 | {"model_type": family}
    assert spec_from_config(config | {"layer_types": None})
    with pytest.raises(ValueError, match=r"layer_types in config.json must name \w+_attention for each of 4 layers"):
        spec_from_config(config | change)
    kind = "sliding_attention" if family == "mistral" else "full_attention"
    assert spec_from_config(config | {"layer_types": [kind] * 4}) == spec_from_config(config)


@pytest.mark.parametrize("key", sorted(set(NEUTRAL) - {"is_decoder"}))
def test_a_key_that_changes_numbers_and_is_not_computed_is_refused(key):
    for value in NEUTRAL[key]:
        assert spec_from_config(QWEN3 | {key: value}) == spec_from_config(QWEN3)
    with pytest.raises(ValueError, match=f"{key} in config.json must be left out: got"):
        spec_from_config(QWEN3 | {key: {"quant_method": "fp8"}})


def test_a_key_that_transformers_does_not_have_is_listed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"final_logit_softcapping": 30.0, "use_mrope": False}))
    assert unread_keys(tmp_path) == ["final_logit_softcapping", "use_mrope"]


def with_head(directory: Path, head: torch.Tensor | None) -> Path:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("lm_head.weight", None)
    save_file(tensors | ({} if head is None else {"lm_head.weight": head}), path, metadata={"format": "pt"})
    return directory


def tied_model(models, tmp_path) -> Path:
    name = next(name for name in ALL if load_spec(models(name)).tied)
    return changed(models(name), tmp_path)


def test_a_tied_model_whose_files_hold_another_head_is_refused(models, tmp_path):
    directory = tied_model(models, tmp_path)
    spec = load_spec(directory)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    expected = transformers_logits(directory)
    with_head(directory, embedding.clone())
    check_tensor_files(directory, spec)
    assert torch.equal(transformers_logits(directory), expected)
    other = embedding.clone()
    other[-1, -1] += 1
    for head, says in (
        (torch.randn_like(embedding), "other numbers"),
        (other, "other numbers"),
        (embedding[:-1].clone(), r"F32 of \(\d+, \d+\) instead of F32 of"),
        (embedding.double(), "F64 of"),
    ):
        with pytest.raises(ValueError, match=rf"lm_head.weight must be left out or be equal to .* it holds {says}"):
            check_tensor_files(with_head(directory, head), spec)
    with_head(directory, torch.randn_like(embedding))
    assert (transformers_logits(directory) - expected).abs().max() > 0.01, "transformers computes with the head"
    # A critic has no use for it.
    check_tensor_files(directory, load_spec(directory, value_head=True))
