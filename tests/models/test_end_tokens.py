"""The tokens that end a response are those that transformers would end it with."""

from __future__ import annotations

import json

import pytest

from fivefold.models.config_json import read_config
from fivefold.models.end_tokens import EndTokens

CASES = [
    (5, ..., 7, {5}, "config.json"),
    (5, {"eos_token_id": [7, 8]}, 7, {7, 8}, "generation_config.json"),
    ([5, 6], {"eos_token_id": 7}, 7, {7}, "generation_config.json"),
    (5, {"eos_token_id": 5}, 5, {5}, ""),
    (5, ..., None, {5}, ""),
]


@pytest.mark.parametrize(("config", "generation", "tokenizer", "ends", "source"), CASES)
def test_where_files_name_other_end_tokens_those_of_transformers_are_used(
    models, tmp_path, config, generation, tokenizer, ends, source
):
    import transformers

    directory = models("llama")
    for file in directory.iterdir():
        if file.suffix == ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(read_config(directory) | {"eos_token_id": config}))
    if generation is not ...:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = EndTokens.of(tmp_path, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    assert found.used == ends == set(theirs if isinstance(theirs, list) else [theirs])
    assert (f"{sorted(ends)} of {source}, as with transformers" in found.contradiction) == bool(source)


def test_where_only_the_tokenizer_names_an_end_token_it_is_used(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"pad_token_id": 3}')
    assert EndTokens.of(tmp_path, 4).used == {4}
    assert EndTokens.of(tmp_path, None).used == frozenset()
