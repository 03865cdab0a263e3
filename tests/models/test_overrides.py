"""Values in place of those in config.json: what is read is changed, the files stay, unknown keys are refused by name."""

from __future__ import annotations

import json

import pytest

from fivefold.config.schema import ModelConfig
from fivefold.errors import UserError
from fivefold.models.families import load_spec
from fivefold.models.overrides import overridden


@pytest.fixture
def directory(models, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return models("qwen3")


def test_a_model_with_overrides_has_their_values_and_the_same_weights(directory):
    changed = overridden(directory, {"rms_norm_eps": 0.25})
    assert load_spec(changed).norm_eps == 0.25 != load_spec(directory).norm_eps
    for path in directory.iterdir():
        if path.name != "config.json":
            assert (changed / path.name).resolve() == path.resolve()
    assert overridden(directory, {"rms_norm_eps": 0.25}) == changed != overridden(directory, {"rms_norm_eps": 0.5})


def test_a_mapping_of_config_json_keeps_the_keys_that_are_not_overridden(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"rope_scaling": {"type": "linear", "factor": 2.0}}))
    changed = overridden(tmp_path / "model", {"rope_scaling": {"factor": 4.0}})
    assert json.loads((changed / "config.json").read_text()) == {"rope_scaling": {"type": "linear", "factor": 4.0}}


def test_an_override_of_a_key_that_config_json_lacks_is_refused_by_name(directory):
    with pytest.raises(UserError, match=r"model\.overrides\.rms_norm_epsilon: .*no such key.*did you mean 'rms_norm_eps'"):
        overridden(directory, {"rms_norm_epsilon": 0.25})


def test_overrides_are_those_of_the_policys_model_only(directory, tmp_path):
    model = ModelConfig(path=str(directory), overrides={"rms_norm_eps": 0.25})
    assert load_spec(model.described_by(model.path)).norm_eps == load_spec(model.tokenizer_path).norm_eps == 0.25
    assert model.described_by(str(tmp_path)) == str(tmp_path)
