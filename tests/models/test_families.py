"""config.json -> ModelSpec -> parameters, family by family, against what transformers reads and writes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.layout import ParallelLayout
from fivefold.models import families
from fivefold.models.families import FAMILIES, load_spec, parameters_of, spec_from_config
from tests.support.public_shapes import SHAPES
from tests.support.tiny_models import MOE_VARIANTS, VARIANTS, load_tensors

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}


ALL = list(VARIANTS | MOE_VARIANTS)


def test_the_families_are_the_files():
    folder = Path(families.__file__).parent
    assert set(FAMILIES) == {file.stem for file in folder.glob("*.py")} - {"__init__"}


def test_every_family_has_a_test_model():
    import transformers

    types = {getattr(transformers, f"{prefix}Config").model_type for prefix, _ in (VARIANTS | MOE_VARIANTS).values()}
    # MiMo is made of Qwen2 by add_mtp.
    assert types | {"mimo"} == set(FAMILIES)


NEW_FAMILY = """
from dataclasses import replace
from fivefold.models.config_json import read_decoder
from fivefold.models.family import Family
from fivefold.models.parameters import decoder

FAMILY = Family("toy_family", lambda config: replace(read_decoder(config), qkv_bias=True), decoder)
"""


def test_a_new_family_is_one_file(models, tmp_path, monkeypatch):
    """Qwen2's tensors under a name of their own: bridge and engine read the file, and nothing else changes."""
    import transformers

    from fivefold.engines.transformers import parameter_map
    from fivefold.models.tensor_files import check_tensor_files

    (tmp_path / "toy_family.py").write_text(NEW_FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.setattr(families, "FAMILIES", families.find_families())
    directory = models("qwen2")
    config = json.loads((directory / "config.json").read_text())
    spec = spec_from_config(config | {"model_type": "toy_family"})
    assert spec == replace(load_spec(directory), family="toy_family")
    check_tensor_files(directory, spec)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert set(parameter_map(model, spec)) == set(load_tensors(directory))


@pytest.mark.parametrize("name", ALL)
def test_the_table_names_every_tensor_of_the_files_once(models, name):
    spec, files = load_spec(models(name)), load_tensors(models(name))
    named = [name for parameter in parameters_of(spec) for name in parameter.hf]
    assert sorted(named) == sorted(files)
    value_head = load_spec(models(name), value_head=True)
    named = [name for parameter in parameters_of(value_head) for name in parameter.hf]
    assert sorted(named) == sorted({*files, "score.weight"} - {"lm_head.weight"})


def test_every_kind_of_sharding_is_implemented():
    from fivefold.megatron.bridge.sharding import SHARDERS
    from fivefold.models.parameters import Sharding

    assert set(SHARDERS) == set(Sharding)


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_as_transformers_counts_them(models, name):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models(name))
    assert load_spec(models(name)).parameters == model.num_parameters()


def test_both_spellings_of_rope_are_read():
    old = spec_from_config(QWEN3 | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    new = spec_from_config(QWEN3 | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}})
    assert old == new
    assert (old.rope_theta, old.rope_linear_factor) == (5e5, 4.0)


@pytest.mark.parametrize("family", ["qwen2", "mimo"])
def test_a_qwen2_has_biases_of_queries_whatever_its_config_says(family):
    """Neither transformers' Qwen2 nor vLLM's reads the key, which published MiMo-7B configurations have."""
    config = QWEN3 | {"model_type": family}
    for value in (True, False, None):
        assert spec_from_config(config | {"attention_bias": value}) == spec_from_config(config)
    assert spec_from_config(config).qkv_bias


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "unknown model family 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias: true is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE variant 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "RoPE variant 'dynamic' is not supported"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "low_freq_factor=1 only: got 2.0",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "mixture of attention kinds"),
        ({"num_key_value_heads": None}, "must have num_key_value_heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        spec_from_config(QWEN3 | change)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("megatron:t16", "attention heads must be divisible by tp"),
        ("megatron:t8", "key/value heads must be divisible by tp"),
        ("megatron:p3", "layers must be divisible by pp"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, says):
    with pytest.raises(ValueError, match=says):
        spec_from_config(QWEN3).check_layout(ParallelLayout.parse(layout))


def test_tensor_ranks_must_divide_the_padded_vocabulary():
    """Three ranks share SmolLM2's 9 heads, 3 key/value heads and 384 x 128 tokens; one token more is padded to 385 x 128."""
    layout = ParallelLayout.parse("megatron:t3")
    spec_from_config(SHAPES["SmolLM2-135M-Instruct"]).check_layout(layout)
    with pytest.raises(
        ValueError, match=r"tp must divide the padded vocabulary of 49280 \(of 49153, .*choose a power of two"
    ):
        spec_from_config(SHAPES["SmolLM2-135M-Instruct"] | {"vocab_size": 49153}).check_layout(layout)


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json in"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="must hold a JSON object"):
        load_spec(tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_the_shape_of_every_tensor_follows_from_config_json(models, name):
    """Those of the files that transformers wrote; together they are the model's parameters."""
    from fivefold.models.shapes import file_shapes
    from fivefold.models.tensor_files import check_tensor_files, read_headers

    spec = load_spec(models(name))
    headers = read_headers(models(name) / "model.safetensors")
    shapes = {n: s for item in parameters_of(spec) for n, s in zip(item.hf, file_shapes(spec, item), strict=True)}
    assert shapes == {n: header.shape for n, header in headers.items()}
    biases = sum(math.prod(shape) for n, shape in shapes.items() if n.endswith("e_score_correction_bias"))
    assert sum(map(math.prod, shapes.values())) - biases == spec.parameters
    check_tensor_files(models(name), spec)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_the_light_tokenizer_encodes_and_renders_as_transformers_does(tmp_path, kind):
    from fivefold.data.light_tokenizer import LightTokenizer
    from fivefold.data.prompts import render
    from fivefold.data.tokenizer import load_tokenizer, train_tokenizer

    texts = ["What is 12+34? Say it\n\nin wörds.", "{'a': [1, 2]} <|end|>"]
    train_tokenizer(kind, texts, tmp_path, 400)
    messages = [{"role": "system", "content": texts[0]}, {"role": "user", "content": texts[1]}]
    template = (
        "{%- for m in messages -%}{% if loop.first and m.role != 'system' %}{{ raise_exception('no') }}{% endif %}\n"
        "  <{{ m['role'] }}>{{ m.content | trim }}{{ eos_token }}{{ m | tojson }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    for written in (None, template):
        if written is not None:
            (tmp_path / "chat_template.jinja").write_text(written)
        theirs, ours = load_tokenizer(str(tmp_path)), LightTokenizer.load(tmp_path)
        tokens, text = render(messages, theirs)
        assert ours.render(messages) == text
        assert ours.backend.encode(text).ids == tokens
        assert (ours.eos_token_id, ours.highest_id(with_added=True)) == (theirs.eos_token_id, len(theirs) - 1)


def test_characters_without_a_token_are_seen_and_spaces_are_not(tmp_path):
    import tokenizers
    from tokenizers import models as kinds
    from tokenizers import pre_tokenizers

    from fivefold.data.light_tokenizer import LightTokenizer

    words = tokenizers.Tokenizer(kinds.BPE(vocab={"a": 0, "b": 1, "<e>": 2}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    loaded = LightTokenizer.load(tmp_path)
    assert loaded.check_text("ab  b\na") == [0, 1, 1, 0]
    with pytest.raises(ValueError, match=r"has no token for 'zé' and leaves it out"):
        loaded.check_text("ab zé")


def test_a_tokenizer_of_bytes_has_tokens_for_every_character(tmp_path):
    from fivefold.data.light_tokenizer import LightTokenizer
    from fivefold.data.tokenizer import load_tokenizer, train_tokenizer

    train_tokenizer("bpe", ["plain text"], tmp_path, 300)
    text = "naïve 你好 🙂👍🏽 e\u0301 \u200b\x00\u2028 Ω"
    assert LightTokenizer.load(tmp_path).check_text(text) == load_tokenizer(str(tmp_path)).encode(text)
