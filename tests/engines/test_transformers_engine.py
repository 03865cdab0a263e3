"""The transformers engine against transformers itself, and its draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
from fivefold.engines.sampling import request_seed, sample_token, uniform
from fivefold.engines.transformers import TransformersEngine, parameter_map
from fivefold.models.families import load_spec
from fivefold.types import Sampling
from tests.support.engines import OPTIONS, PROMPTS, SAMPLING, complete, expected_logprobs, requests
from tests.support.tiny_models import MOE_VARIANTS, VARIANTS, load_tensors


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    letters = "".join(chr(33 + i) for i in range(94)) + "".join(chr(192 + i) for i in range(34))
    assert train_tokenizer("char", [letters], out) == 131
    return load_tokenizer(str(out))


@pytest.fixture(scope="module")
def model(models) -> Path:
    return models("qwen3")


def make_engine(model: Path, tokenizer, max_num_seqs: int = 64, change: float = 0.0) -> TransformersEngine:
    import transformers

    engine = TransformersEngine(model, tokenizer, torch.device("cpu"), torch.float32, max_num_seqs)
    source = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    engine.update_weights(((name, p.detach() + change) for name, p in source.named_parameters()), version=3)
    return engine


def test_logprobs_equal_a_forward_of_transformers(model, tokenizer):
    asked = requests(3)
    for request, completion in zip(asked, complete(make_engine(model, tokenizer), asked), strict=True):
        assert completion.logprobs == pytest.approx(
            expected_logprobs(model, request, completion, tokenizer.eos_token_id), abs=2e-5
        )
        assert completion.policy_version == 3
        ended = completion.token_ids[-1] == tokenizer.eos_token_id
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 24
        assert tokenizer.eos_token_id not in completion.token_ids[:-1]


def test_scores_of_attention_are_capped_whatever_transformers_would_choose(models, tokenizer):
    """transformers 5.19 computes Gemma 2 with SDPA, which has no soft cap."""
    import transformers

    engine, directory = make_engine(models("gemma2"), tokenizer), models("gemma2")
    written_out = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    tokens = torch.arange(20)[None]
    assert torch.allclose(engine._model(tokens).logits, written_out(tokens).logits, atol=1e-5)


def test_samples_do_not_depend_on_how_the_batch_is_cut_or_ordered(model, tokenizer):
    asked = requests(4)
    whole = complete(make_engine(model, tokenizer), asked)
    cut = complete(make_engine(model, tokenizer, max_num_seqs=3), asked[::-1])[::-1]
    assert [completion.token_ids for completion in whole] == [completion.token_ids for completion in cut]
    assert len({tuple(completion.token_ids) for completion in whole}) == 16


def test_a_completion_comes_as_soon_as_it_ends(model, tokenizer):
    """The shortest first, not in the order of the requests."""
    lengths = [len(completion.token_ids) for completion in make_engine(model, tokenizer).generate(requests(8))]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == 24


def test_abort_gives_what_was_sampled_so_far(model, tokenizer):
    engine, whole = make_engine(model, tokenizer), complete(make_engine(model, tokenizer), requests(8))
    completions = []
    for completion in engine.generate(requests(8)):
        completions.append(completion)
        engine.abort()
    stopped = [one for one in completions if one.finish_reason == "abort"]
    assert len(completions) == 32 and len(stopped) > 16
    for one in stopped:
        assert 0 < len(one.token_ids) < len(whole[one.request_id].token_ids)
        assert one.token_ids == whole[one.request_id].token_ids[: len(one.token_ids)]
    assert complete(engine, requests(8)) == whole


def test_another_key_draws_another_sample(model, tokenizer):
    engine = make_engine(model, tokenizer)
    first = complete(engine, requests(1, prompts=PROMPTS[:1]))[0].token_ids
    for draw in ((6, 2), (5, 3)):
        assert complete(engine, requests(1, prompts=PROMPTS[:1], draw=draw))[0].token_ids != first


def test_greedy_equals_transformers_generate(model, tokenizer):
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    asked = requests(1, Sampling(max_tokens=12, temperature=0))
    for request, completion in zip(asked, complete(make_engine(model, tokenizer), asked), strict=True):
        prompt = torch.tensor([request.prompt_ids])
        out = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
        assert completion.token_ids == out[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", OPTIONS)
def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(model, tokenizer, name):
    """Every option once more, token by token, by transformers' own processors where it has one."""
    asked = requests(3, replace(SAMPLING, **OPTIONS[name]))
    engine = make_engine(model, tokenizer, max_num_seqs=5)
    for request, completion in zip(asked, complete(engine, asked), strict=True):
        assert completion.logprobs == pytest.approx(
            expected_logprobs(model, request, completion, tokenizer.eos_token_id), abs=5e-5
        )
        assert completion.finish_reason == "length" or len(completion.token_ids) > request.sampling.min_tokens
    plain = complete(engine, requests(3))
    assert [completion.token_ids for completion in plain] != [completion.token_ids for completion in complete(engine, asked)]


def test_ignore_eos_samples_to_the_limit_and_stop_token_ids_end_a_response(model, tokenizer):
    engine, eos = make_engine(model, tokenizer), tokenizer.eos_token_id
    likely = replace(SAMPLING, logit_bias=((eos, 5.0), (8, 2.0)))
    assert {completion.finish_reason for completion in complete(engine, requests(4, likely))} == {"stop"}
    for completion in complete(engine, requests(4, replace(likely, ignore_eos=True))):
        assert completion.finish_reason == "length" and len(completion.token_ids) == 24
    for completion in complete(engine, requests(4, replace(likely, ignore_eos=True, stop_token_ids=(8,)))):
        assert (completion.token_ids[-1] == 8) == (completion.finish_reason == "stop") and 8 not in completion.token_ids[:-1]


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(model, tokenizer):
    engine = make_engine(model, tokenizer)
    (free,) = complete(engine, requests(1, prompts=PROMPTS[:1]))
    stop = tokenizer.decode(free.token_ids[3:5])
    (stopped,) = complete(engine, requests(1, replace(SAMPLING, stop=(stop,)), prompts=PROMPTS[:1]))
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(stopped.token_ids).endswith(stop)
    assert stop not in tokenizer.decode(stopped.token_ids[:-1])


def test_new_weights_change_what_is_sampled_and_half_of_them_are_refused(model, tokenizer):
    old = complete(make_engine(model, tokenizer), requests(1))
    engine = make_engine(model, tokenizer, change=0.05)
    assert complete(engine, requests(1)) != old
    with pytest.raises(RuntimeError, match="no new weights for"):
        engine.update_weights(iter([("model.norm.weight", torch.ones(64))]), 4)


def test_the_engine_reads_no_checkpoint_that_the_first_weights_overwrite(models, tokenizer, tmp_path):
    for name in ("config.json",):
        (tmp_path / name).write_text((models("qwen3") / name).read_text())
    engine = TransformersEngine(tmp_path, tokenizer, torch.device("cpu"), torch.float32, 8)
    engine.update_weights(iter(load_tensors(models("qwen3")).items()), version=3)
    assert complete(engine, requests(2)) == complete(make_engine(models("qwen3"), tokenizer), requests(2))


def test_uniform_numbers_are_uniform_and_independent_of_the_batch():
    keys = torch.tensor([request_seed((1, 2, prompt, sample)) for prompt in range(100) for sample in range(20)])
    numbers = torch.stack([uniform(keys, position) for position in range(10)])
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert len(numbers.unique()) == numbers.numel()
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    counts = torch.histc(numbers.flatten(), 20, 0, 1)
    # Chi-squared with 19 degrees of freedom: 43.8 is passed once in a thousand by chance.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8
    assert float(torch.corrcoef(numbers[:2])[0, 1]) == pytest.approx(0, abs=0.08)
    assert torch.equal(uniform(keys[3:5], 4), numbers[4, 3:5])


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    count = 20000
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for temperature, top_p, top_k in [(1.0, 1.0, 0), (0.5, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 2), (1.3, 0.9, 3)]:
        p = torch.softmax(logits / temperature, 0)
        order = p.argsort(descending=True)[: top_k or None].tolist()
        among, total, kept = float(p[order].sum()), 0.0, []
        for token in order:
            if kept and total >= top_p * among:
                break
            kept.append(token)
            total += float(p[token])
        expected = torch.zeros(5)
        expected[kept] = p[kept] / p[kept].sum()
        sampling = Sampling(1, temperature, top_p, top_k)
        tokens, logprobs = sample_token(logits.expand(count, 5), u, sampling)
        assert torch.allclose(torch.bincount(tokens, minlength=5) / count, expected, atol=2e-4)
        assert torch.allclose(logprobs, expected.log()[tokens])


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]] * 3)
    tokens, _ = sample_token(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64), Sampling(1))
    assert tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", [*VARIANTS, *MOE_VARIANTS, "minimax_m2", "qwen3_next", "gpt_oss"])
def test_every_tensor_of_a_model_s_files_has_its_place_in_the_engine(models, name):
    """transformers stacks experts and renames them in memory; weights come by the names in files."""
    import transformers

    directory = models(name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    places, files = parameter_map(loaded, load_spec(directory)), load_tensors(directory)
    assert set(places) == set(files)
    assert all(torch.equal(places[key], files[key]) for key in files)
    # They are the memory itself: what is written there is what samples.
    tokens = torch.arange(5)[None]
    before = loaded(tokens).logits
    for place in places.values():
        place.mul_(0.5)
    assert not torch.allclose(loaded(tokens).logits, before)


def test_an_engine_refuses_a_table_that_is_not_the_model_s(models):
    import transformers

    directory = models("qwen2")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    spec = load_spec(directory)
    for other in (replace(spec, qkv_bias=False), replace(spec, qk_norm=True), replace(spec, layers=3)):
        with pytest.raises(RuntimeError, match=r"the table of qwen2 must name every tensor .* 1?\d differ"):
            parameter_map(loaded, other)
