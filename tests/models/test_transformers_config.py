"""Each config.json that `check` accepts without importing transformers is accepted by transformers too."""

from __future__ import annotations

import json

import pytest

from fivefold.data.tokenizer import check_config
from fivefold.errors import UserError
from fivefold.models.families import load_spec
from tests.support.tiny_models import MOE_VARIANTS, SIZES, VARIANTS

VALUES = [None, True, 0, 1, 0.5, "x", ["x"], {"a": 1}]
OF_THE_CLASS = {"attribute_map", "model_type"}
"""Not of a configuration but of transformers' classes, as are the plans of layouts."""


@pytest.mark.parametrize("name", VARIANTS | MOE_VARIANTS)
def test_transformers_refuses_no_value_that_check_accepts(name, tmp_path):
    import torch
    import transformers

    prefix, changes = (VARIANTS | MOE_VARIANTS)[name]
    kind = getattr(transformers, f"{prefix}Config")
    kind(**{**SIZES, **changes}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    keys = {*config, *kind.__dataclass_fields__} - OF_THE_CLASS
    accepted, refused = [], 0
    for key in sorted(key for key in keys if not key.endswith("_plan")):
        for value in VALUES:
            file.write_text(json.dumps({**config, key: value}))
            try:
                load_spec(tmp_path)
            except UserError:
                refused += 1
                continue
            try:
                check_config(tmp_path)
                with torch.device("meta"):
                    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
            except Exception as error:
                accepted.append((key, value, str(error)))
    assert not accepted
    assert refused > 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_sliding_window": None},
            "use_sliding_window in config.json must be bool, as transformers declares it: got None",
        ),
        ({"rms_norm_eps": 1}, "rms_norm_eps in config.json must be float, as transformers declares it: got 1"),
        (
            {"eos_token_id": ["x"]},
            r"eos_token_id in config.json must be int \| list\[int\] \| None, as transformers declares it",
        ),
        ({"use_cache": 1}, "use_cache in config.json must be bool, as transformers declares it: got 1"),
        (
            {"id2label": "x"},
            r"id2label in config.json must be dict\[str, str\] \| None, as transformers declares it: got 'x'",
        ),
        ({"id2label": {"a": "b"}}, "id2label in config.json must have whole numbers as its keys"),
        ({"pad_token_id": 500}, "pad_token_id in config.json must be a token of the vocabulary of 131: got 500"),
    ],
)
def test_a_value_that_transformers_refuses_is_named_with_its_type(changes, message, models, tmp_path):
    config = json.loads((models("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=message):
        load_spec(tmp_path)
