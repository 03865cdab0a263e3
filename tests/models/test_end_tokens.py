"""The tokens that end a response are those of transformers, and pad tokens that contradict each other are reported."""

from __future__ import annotations

import json

import pytest
import torch

from fivefold.models.config_json import read_config
from fivefold.models.end_tokens import EndTokens, PadTokens

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
    end_tokens = EndTokens.of(tmp_path, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    assert end_tokens.used == ends == set(theirs if isinstance(theirs, list) else [theirs])
    assert (f"{sorted(ends)} of {source}, as with transformers" in end_tokens.contradiction) == bool(source)


def test_where_only_the_tokenizer_names_an_end_token_it_is_used(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"pad_token_id": 3}')
    assert EndTokens.of(tmp_path, 4).used == {4}
    assert EndTokens.of(tmp_path, None).used == frozenset()


PADS = [
    (5, ..., 7, {"config.json": 5, "the tokenizer": 7}, 5),
    (5, {"pad_token_id": 6}, None, {"generation_config.json": 6, "config.json": 5}, 6),
    (None, {"pad_token_id": 6}, 7, {"generation_config.json": 6, "the tokenizer": 7}, 6),
    (5, {"pad_token_id": 5}, 5, {}, 5),
    (None, ..., 7, {}, None),
]


@pytest.mark.parametrize(("config", "generation", "tokenizer", "named", "fills"), PADS)
def test_pad_tokens_that_differ_are_named_with_what_transformers_pads(
    models, tmp_path, config, generation, tokenizer, named, fills
):
    import transformers

    directory = with_pad(models("llama"), tmp_path, config)
    if generation is not ...:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    message = PadTokens.of(tmp_path, tokenizer).contradiction
    assert bool(message) == bool(named)
    assert all(f"{token} of {source}" in message for source, token in named.items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).generation_config.pad_token_id
    assert theirs == fills
    if named:
        first = next(iter(named.items()))
        assert first[1] == theirs and f"pad tokens differ: {first[1]} of {first[0]}" in message


def with_pad(model, directory, pad, **changes):
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (directory / file.name).unlink(missing_ok=True)
            (directory / file.name).symlink_to(file)
    (directory / "config.json").write_text(json.dumps(read_config(model) | {"pad_token_id": pad, **changes}))
    return directory


def test_a_pad_token_that_ends_responses_is_learned_and_masked_by_a_collator(tmp_path):
    import transformers

    from tests.support.tiny_models import make_tokenizer

    (tmp_path / "config.json").write_text("{}")
    words = transformers.AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "words"))
    words.pad_token = words.eos_token
    collator = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    labels = collator([{"input_ids": [*words.encode("12"), words.eos_token_id]}])["labels"][0]
    assert labels[-1] == -100 and (labels[:-1] != -100).all()
    pads = PadTokens.of(tmp_path, words.pad_token_id)
    assert f"token {words.eos_token_id} ends responses and is also the pad token of the tokenizer" in pads.learned(
        words.eos_token_id
    )
    assert "embedding" not in pads.learned(words.eos_token_id)
    assert pads.learned(words.eos_token_id + 1) == "" == pads.contradiction


def test_check_reports_pad_tokens_that_differ_and_one_that_ends_responses(models, tmp_path):
    import transformers

    from fivefold.config import RunConfig
    from fivefold.plan.check import check
    from tests.support.tiny_models import make_tokenizer

    words = transformers.AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "words"))
    end, pad = words.eos_token_id, words.pad_token_id
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "ground_truth": "#### 1"}) + "\n")
    notes = {}
    for config in (None, end):
        with_pad(models("qwen3"), model, config, eos_token_id=end)
        run = RunConfig.of(
            model={"path": str(model), "tokenizer": str(tmp_path / "words")}, policy={"dtype": "float32"},
            data={"train": [str(tmp_path / "rows.jsonl")], "prompts_per_step": 1, "max_response_tokens": 8,
                  "max_prompt_tokens": 8, "ground_truth_key": "ground_truth"},
            reward={"functions": {"gsm8k": 1.0}}, trainer={"steps": 1, "run_dir": str(tmp_path / "run")},
        )  # fmt: skip
        findings = check(run)
        assert findings.errors == []
        notes[config] = [note for note in findings.notes if "pad token" in note]
    differ, learned = notes[end]
    assert f"pad tokens differ: {end} of config.json, {pad} of the tokenizer; none is used" in differ
    assert f"token {end} ends responses and is also the pad token of config.json" in learned
    assert learned.endswith("and models the gradient of its embedding as an input")
    body = transformers.AutoModel.from_pretrained(model)
    body(torch.tensor([[pad, end]])).last_hidden_state.sum().backward()
    gradients = body.get_input_embeddings().weight.grad
    assert gradients[pad].any() and not gradients[end].any()
    assert notes[None] == []


@pytest.mark.parametrize("value", [True, "x", [5], 1.5])
def test_a_pad_token_that_is_no_token_is_refused(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": value}))
    with pytest.raises(ValueError, match="pad_token_id must be a token: got"):
        PadTokens.of(tmp_path, None)


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 4, 4], [1, 4, 2, 4], [4, 1, 4], [4, 4]])
def test_a_classifier_scores_the_last_token_that_is_no_padding_as_transformers_does(tmp_path, tokens):
    import torch
    import transformers

    from fivefold.reward.reward_model import scored_part
    from tests.support.tiny_models import make_classifier

    model = transformers.AutoModelForSequenceClassification.from_pretrained(make_classifier(tmp_path, pad_token_id=4)).eval()
    scored = scored_part(tokens, 4)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0, 0]
        values_T = model.score(model.model(torch.tensor([scored]))[0])[0, :, 0]
    assert theirs.item() == pytest.approx(values_T[-1].item(), abs=1e-6)
    assert scored_part(tokens, None) == tokens
