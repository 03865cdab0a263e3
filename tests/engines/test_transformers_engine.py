"""The embedded engine against transformers, and its draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fivefold.data.tokenizer import load_tokenizer, train_tokenizer
from fivefold.engines.sampling import request_seed, sample_token, uniform
from fivefold.engines.transformers import TransformersEngine, parameter_map
from fivefold.models.families import load_spec
from fivefold.types import Prompt, Sampling
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


PROMPTS = [Prompt(i, list(range(5, 5 + n)), "s", "p", "t") for i, n in enumerate([3, 9, 1, 5])]
SAMPLING = Sampling(max_tokens=24, temperature=0.7, seed=5, step=2)


def test_logprobs_equal_a_forward_of_transformers(model, tokenizer):
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    for group in make_engine(model, tokenizer).generate(PROMPTS, 3, SAMPLING):
        for sample in group.samples:
            tokens = torch.tensor(group.prompt.token_ids + sample.token_ids)
            with torch.no_grad():
                logp = torch.log_softmax(reference(tokens[None]).logits[0] / 0.7, -1)
            own = logp[len(group.prompt.token_ids) - 1 : -1].gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(sample.logprobs), own, atol=2e-5)
            assert sample.policy_version == 3
            ended = sample.token_ids[-1] == tokenizer.eos_token_id
            assert sample.finished == ended
            assert ended or len(sample.token_ids) == 24
            assert tokenizer.eos_token_id not in sample.token_ids[:-1]


def test_samples_do_not_depend_on_how_the_batch_is_cut_or_ordered(model, tokenizer):
    whole = make_engine(model, tokenizer).generate(PROMPTS, 4, SAMPLING)
    cut = make_engine(model, tokenizer, max_num_seqs=3).generate(PROMPTS[::-1], 4, SAMPLING)[::-1]
    assert [[s.token_ids for s in g.samples] for g in whole] == [[s.token_ids for s in g.samples] for g in cut]
    assert len({tuple(s.token_ids) for g in whole for s in g.samples}) == 16


def test_another_step_seed_or_prompt_draws_other_samples(model, tokenizer):
    engine = make_engine(model, tokenizer)
    first = engine.generate(PROMPTS[:1], 2, SAMPLING)[0].samples[0].token_ids
    for other in (Sampling(24, 0.7, seed=6, step=2), Sampling(24, 0.7, seed=5, step=3)):
        assert engine.generate(PROMPTS[:1], 2, other)[0].samples[0].token_ids != first
    renumbered = Prompt(9, PROMPTS[0].token_ids, "s", "p", "t")
    assert engine.generate([renumbered], 2, SAMPLING)[0].samples[0].token_ids != first


def test_greedy_equals_transformers_generate(model, tokenizer):
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    for group in make_engine(model, tokenizer).generate(PROMPTS, 1, Sampling(max_tokens=12, temperature=0)):
        prompt = torch.tensor([group.prompt.token_ids])
        out = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
        assert group.samples[0].token_ids == out[0, prompt.shape[1] :].tolist()


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(model, tokenizer):
    engine = make_engine(model, tokenizer)
    free = engine.generate(PROMPTS[:1], 1, SAMPLING)[0].samples[0]
    stop = tokenizer.decode(free.token_ids[3:5])
    stopped = engine.generate(PROMPTS[:1], 1, Sampling(24, 0.7, stop=(stop,), seed=5, step=2))[0].samples[0]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stopped.finished
    assert tokenizer.decode(stopped.token_ids).endswith(stop)
    assert stop not in tokenizer.decode(stopped.token_ids[:-1])


def test_new_weights_change_what_is_sampled_and_half_of_them_are_refused(model, tokenizer):
    old = make_engine(model, tokenizer).generate(PROMPTS, 1, SAMPLING)
    engine = make_engine(model, tokenizer, change=0.05)
    assert engine.generate(PROMPTS, 1, SAMPLING) != old
    with pytest.raises(RuntimeError, match="no new weights for"):
        engine.update_weights(iter([("model.norm.weight", torch.ones(64))]), 4)


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
        order = p.argsort(descending=True)
        kept, total = [], 0.0
        for rank, token in enumerate(order.tolist()):
            if (rank and total >= top_p) or (top_k and rank >= top_k):
                break
            kept.append(token)
            total += float(p[token])
        expected = torch.zeros(5)
        expected[kept] = p[kept] / p[kept].sum()
        tokens, logprobs = sample_token(logits.expand(count, 5), u, temperature, top_p, top_k)
        assert torch.allclose(torch.bincount(tokens, minlength=5) / count, expected, atol=2e-4)
        assert torch.allclose(logprobs, torch.log_softmax(logits / temperature, 0)[tokens])


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]] * 3)
    tokens, _ = sample_token(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64), 1.0, 1.0, 0)
    assert tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", list(VARIANTS | MOE_VARIANTS))
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
