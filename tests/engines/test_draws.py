"""A million draws of each engine, with keys as runs make them: their distribution, their independence, and injected faults."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fivefold.engines.sampling import request_seed, uniform
from fivefold.types import Prompt, Sampling
from tests.support.draws import LOGITS, SAMPLINGS, constant_model, expected, failed, noise, rarity
from tests.support.tiny_models import load_tensors
from tests.support.toy import ToyScorer, ToyTokenizer

MILLION = (4, 4, 25, 50, 50)
FEW = (2, 2, 10, 10, 50)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return constant_model(tmp_path_factory.mktemp("model") / "constant")


def drawn(mesh, directory: Path, run_dir: Path, shape, sampling: Sampling, fault="", backend="transformers") -> torch.Tensor:
    """What runs of several seeds sample: by their own rollouts and the engine, one call for each step."""
    from fivefold.data.prompt_loader import PromptLoader
    from fivefold.observability.run_logger import RunLogger
    from fivefold.reward.manager import RewardManager
    from fivefold.rollout.generation import Generator
    from fivefold.rollout.sources import EngineRollouts, PromptQueue

    seeds, steps, prompts, responses, _ = shape
    engine = ENGINES[backend](mesh, directory, prompts * responses)
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    if fault:
        (FAULTS | VLLM_FAULTS)[fault][0](engine)
    logger = RunLogger(run_dir, [], is_main=True, steps=steps)
    generator = Generator(engine, ToyTokenizer(), RewardManager(ToyScorer(), mesh.ranks), logger)
    rows = [Prompt(number, [1 + number % 5], "toy", str(number), "") for number in range(prompts)]
    grid = torch.empty(shape, dtype=torch.long)
    for seed in range(seeds):
        source = EngineRollouts(
            generator, PromptQueue(PromptLoader(rows, prompts, seed=seed, shuffle=True), logger), logger, sampling, seed=seed,
            group_size=responses, prompts_per_call=prompts,
        )  # fmt: skip
        for step in range(steps):
            for group in source.next(step):
                grid[seed, step, group.prompt.id] = torch.tensor([sample.token_ids for sample in group.samples])
    return grid


def transformers_engine(mesh, directory: Path, most: int):
    from fivefold.engines.transformers import TransformersEngine

    return TransformersEngine(directory, SimpleNamespace(eos_token_id=2), mesh.device, torch.float32, most)


def vllm_engine(mesh, directory: Path, most: int):
    from tests.engines.test_vllm_engine import vllm_engine

    return vllm_engine(mesh, directory, "d1", {"max_num_seqs": most})


ENGINES = {"transformers": transformers_engine, "vllm": vllm_engine}


def sampling_of(name: str, shape=MILLION) -> Sampling:
    return Sampling(shape[-1], ignore_eos=True, **SAMPLINGS[name])


def reproduced(grid: torch.Tensor) -> float:
    """Share of the draws that are the ones of their (seed, step, prompt, response, position), written out in numpy."""
    sums = expected(Sampling(1)).numpy().cumsum()
    return float((np.searchsorted(sums, noise(grid.shape), side="right") == grid.numpy()).mean())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_million_draws_follow_their_distribution_and_are_independent(cluster, model, tmp_path, name):
    (grid,) = cluster.run(drawn, "megatron:d1", model, tmp_path, MILLION, sampling_of(name))
    assert grid.numel() == 10**6 and failed(grid, sampling_of(name)) == set()
    if name == "plain":
        # Sums in float32 and in float64 differ in the last place.
        assert reproduced(grid) > 1 - 1e-5


def test_a_million_numbers_of_neighboring_keys_are_uniform_and_independent():
    """All pairs of neighbors on an axis, in 16 x 16 cells."""
    seeds, steps, prompts, responses, positions = MILLION
    keys = [
        request_seed((seed, step, prompt, response))
        for seed in range(seeds) for step in range(steps) for prompt in range(prompts) for response in range(responses)
    ]  # fmt: skip
    keys_N = torch.tensor(keys)
    grid = torch.stack([uniform(keys_N, position) for position in range(positions)], -1).view(MILLION)
    assert len(keys_N.unique()) == len(keys) and np.array_equal(grid.numpy(), noise(MILLION))
    cells = (16 * grid).long()
    statistics = []
    for axis in range(5):
        length = grid.shape[axis] // 2 * 2
        both = cells.narrow(axis, 0, length).unflatten(axis, (-1, 2))
        counts = torch.bincount((16 * both.select(axis + 1, 0) + both.select(axis + 1, 1)).flatten(), minlength=256).double()
        mean = counts.sum() / 256
        statistics.append(rarity(float(((counts - mean) ** 2 / mean).sum()), 255))
        first, second = (both.select(axis + 1, side).flatten().double() for side in (0, 1))
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / len(first) ** 0.5
    assert min(statistics) > 1e-4, statistics


def test_a_key_draws_the_outputs_of_splitmix64():
    """The published first outputs for the seed 1234567."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    numbers = [float(uniform(torch.tensor([1234567]), position)) for position in range(5)]
    assert numbers == [(output >> 11) * 2.0**-53 for output in outputs]


def of_key(change):
    """Plant another key of a request: `change` gets (seed, step, prompt, response)."""

    def plant(engine) -> None:
        from fivefold.rollout import generation

        generation.request_seed = lambda parts: request_seed(change(*parts))

    return plant


def of_noise(injected):
    """Inject another noise in the transformers engine: `injected` gets the keys and the position."""

    def plant(engine) -> None:
        from fivefold.engines import transformers

        transformers.uniform = injected

    return plant


FAULTS = {
    "seed not used": (of_key(lambda seed, *rest: (0, *rest)), "seed"),
    "step not used": (of_key(lambda seed, step, *rest: (seed, 0, *rest)), "step"),
    "prompt not used": (of_key(lambda seed, step, prompt, response: (seed, step, 0, response)), "prompt"),
    "number of the response not used": (of_key(lambda *parts: parts[:3]), "response"),
    "key not used": (of_noise(lambda keys_N, position: uniform(torch.zeros_like(keys_N), position)), "response"),
    "position not used": (of_noise(lambda keys_N, position: uniform(keys_N, 0)), "position"),
    "position off by one": (of_noise(lambda keys_N, position: uniform(keys_N, position + 1)), "reproduction"),
    "the first position twice": (of_noise(lambda keys_N, position: uniform(keys_N, max(0, position - 1))), "reproduction"),
    "noise shared between two requests": (
        of_noise(lambda keys_N, position: uniform(torch.cat([keys_N[:1], keys_N[:1], keys_N[2:]]), position)),
        "same response",
    ),
    "noise shared between neighbors": (
        of_noise(lambda keys_N, position: uniform(keys_N.view(-1, 2)[:, :1].expand(-1, 2).flatten(), position)),
        "response",
    ),
    "noise that is not even": (of_noise(lambda keys_N, position: uniform(keys_N, position) ** 1.02), "distribution"),
}
"""Name -> (a slip in one line of the real code, which it plants there; the check that sees it)."""


@pytest.mark.parametrize("name", ["", *FAULTS])
def test_a_seed_or_position_that_is_not_used_and_noise_that_is_shared_are_seen(cluster, model, tmp_path, name):
    shape = MILLION if name == "noise that is not even" else FEW
    sampling = sampling_of("plain", shape)
    (grid,) = cluster.run(drawn, "megatron:d1", model, tmp_path, shape, sampling, name)
    checks = failed(grid, sampling) | ({"reproduction"} if reproduced(grid) < 1 - 1e-4 else set())
    assert FAULTS[name][1] in checks if name else checks == set(), checks


FORMS = ("of this device", "of GPUs")
"""vLLM's own noise for CPUs, and torch's exponential noise, which it takes on GPUs where requests have seeds."""


def drawn_by_sampler(mesh, shape, sampling: Sampling, form: str = FORMS[0]) -> torch.Tensor:
    """What vLLM's sampler draws from LOGITS for requests with our seeds, all of them in one batch."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    from fivefold.engines.vllm.parameters import sampling_arguments, seed_of

    arguments = sampling_arguments(sampling, ())
    keys = [request_seed(map(int, parts)) for parts in np.ndindex(*shape[:-1])]
    count, sampler, off = len(keys), Sampler("processed_logprobs"), torch.zeros(0)
    if form == "of GPUs":
        sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    metadata = SamplingMetadata(
        temperature=torch.full((count,), arguments["temperature"]), all_greedy=False, all_random=True,
        top_p=torch.full((count,), arguments["top_p"]) if arguments["top_p"] < 1 else None,
        top_k=torch.full((count,), arguments["top_k"], dtype=torch.int32) if arguments["top_k"] > 0 else None,
        generators={row: torch.Generator().manual_seed(seed_of(key)) for row, key in enumerate(keys)},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=off, presence_penalties=off,
        repetition_penalties=off, output_token_ids=[], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    drawn = [sampler(LOGITS.repeat(count, 1), metadata).sampled_token_ids[:, 0].long() for _ in range(shape[-1])]
    return torch.stack(drawn, -1).view(shape)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_million_draws_of_vllm_s_sampler_follow_theirs_and_are_independent(cluster, name, form):
    (grid,) = cluster.run(drawn_by_sampler, "megatron:d1", MILLION, sampling_of(name), form)
    assert grid.numel() == 10**6 and failed(grid, sampling_of(name)) == set()


def seeds_of(change):
    """Plant other seeds of vLLM's requests: `change` gets the key of each, one after the other."""

    def plant(engine) -> None:
        from fivefold.engines.vllm import parameters as module

        module.seed_of = change

    return plant


def shared_by_two(held=[]):  # noqa: B006
    from fivefold.engines.vllm.parameters import seed_of

    def change(seed: int) -> int:
        held.append(seed_of(seed))
        return held[0] if len(held) == 2 else held[-1]

    return change


def one_number_too_many(engine) -> None:
    """Plant a draw of each request before its first one, whose noise is then lost."""
    sampler = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler.topk_topp_sampler
    forward, begun = sampler.forward, []

    def later(logits, generators, *rest):
        for generator in generators.values():
            if not any(generator is one for one in begun):
                begun.append(generator)
                torch.randint(0, 2**31, (1,), generator=generator)
        return forward(logits, generators, *rest)

    sampler.forward = later


VLLM_FAULTS = {
    "vllm: seed not used": (seeds_of(lambda seed: None), "reproduction"),
    "vllm: one seed for all requests": (seeds_of(lambda seed: 7), "response"),
    "vllm: noise shared between two requests": (seeds_of(shared_by_two()), "same response"),
    "vllm: position off by one": (one_number_too_many, "reproduction"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """vLLM's attention on CPUs has no heads of 8."""
    return constant_model(tmp_path_factory.mktemp("model") / "wide", 32)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *VLLM_FAULTS])
def test_vllm_s_engine_draws_what_its_sampler_does_and_shared_or_moved_noise_is_seen(cluster, wide, tmp_path, name):
    """Requests of whole steps, against one batch of the sampler with the seeds of their keys."""
    shape = (2, 2, 8, 8, 40)
    sampling = sampling_of("plain", shape)
    (grid,) = cluster.run(drawn, "megatron:d1", wide, tmp_path, shape, sampling, name, "vllm", seconds=900)
    (alone,) = cluster.run(drawn_by_sampler, "megatron:d1", shape, sampling)
    checks = failed(grid, sampling) | (set() if torch.equal(grid, alone) else {"reproduction"})
    assert VLLM_FAULTS[name][1] in checks if name else checks == set(), checks
