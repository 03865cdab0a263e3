"""Draws of our sampler in vLLM's engine, as on a GPU: the kernel and CUDA's generators have stand-ins, everything else is real."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fivefold.errors import RunError
from tests.engines.test_vllm_engine import sized, vllm_engine  # noqa: F401
from tests.engines.test_vllm_logprobs import CASES, LONG, vllm_s_own
from tests.support import philox
from tests.support.engines import OPTIONS, PROMPTS, SAMPLING, complete, expected_logprobs, requests
from tests.support.tiny_models import load_tensors

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SAMPLINGS = {"plain": SAMPLING} | {name: replace(SAMPLING, **OPTIONS[name]) for name in ("top_p", "all")}


def keys_of_others(draws) -> None:
    keys = draws.KeyedSampler._keys
    draws.KeyedSampler._keys = lambda self, *given: tuple(part[::-1] for part in keys(self, *given))


def discarded_draws_counted(draws) -> None:
    philox.Key.get_offset = lambda self: draws.MARK


def late_log_probs(draws) -> None:
    take, before = draws.KeyedSampler.take, [None]

    def late(self):
        before.append(take(self))
        return before[-2] if before[-2] is not None else before[-1]

    draws.KeyedSampler.take = late


def not_truncated(draws) -> None:
    begin = draws.KeyedSampler.__init__

    def begun(self, forward, truncate, seed, draws):
        begin(self, forward, lambda logits, k, p: logits, seed, draws)

    draws.KeyedSampler.__init__ = begun


FAULTS = {
    "keys of other requests": (keys_of_others, "alone"),
    "discarded draws are counted": (discarded_draws_counted, "in pieces"),
    "log-probs of the step before": (late_log_probs, "refused"),
    "top-p left out": (not_truncated, "distribution"),
}
"""Name -> (a slip, which it plants; the check that sees it)."""


def drawn_here(mesh, directory, case: str, samplings, fault: str):
    """What each sampling draws in one batch, alone, next to requests without a key, and by vLLM's own log-probs."""
    from fivefold.engines.vllm import draws

    draws.serve = lambda logits: True
    sys.modules["fivefold.backend.kernels.noise"] = SimpleNamespace(draw_tokens=philox.draw_tokens)
    if fault:
        FAULTS[fault][0](draws)
    engine = vllm_engine(mesh, directory, "d1", CASES[case])
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    generator, torch.Generator = torch.Generator, philox.Key
    seen = {}
    try:
        for name, sampling in samplings.items():
            asked = requests(2, sampling, [*PROMPTS, LONG])
            # Greedy requests have no key, and vLLM computes their log-probs.
            greedy = [replace(one, id=100 + one.id, sampling=replace(SAMPLING, temperature=0.0)) for one in asked]
            whole = complete(engine, asked)
            mixed = complete(engine, [one for pair in zip(greedy, asked, strict=True) for one in pair])
            alone = [complete(engine, [one])[0] for one in reversed(asked)][::-1]
            seen[name] = asked, whole, alone, mixed, vllm_s_own(engine, asked)
    except RunError as error:
        return str(error)
    finally:
        torch.Generator = generator
    return seen


def same(first, second) -> bool:
    """Whether responses have the same tokens, and log-probs that differ as float32 does."""
    pairs = zip(first, second, strict=True)
    return all(a[0] == b[0] and a[1] == pytest.approx(b[1], abs=1e-5) for a, b in pairs)


def failed(seen, directory) -> set[str]:
    checks = set()
    for asked, whole, alone, mixed, of_vllm in seen.values():
        drawn, others, greedy = (
            [(one.token_ids, one.logprobs) for one in part] for part in (whole, mixed[1::2], mixed[::2])
        )
        results = {
            "response": len({tuple(tokens) for tokens, _ in drawn}) == len(asked),
            "alone": same(drawn, [(one.token_ids, one.logprobs) for one in alone]),
            "next to others": same(drawn, others) and all(len(tokens) == len(logprobs) > 0 for tokens, logprobs in greedy),
            "vLLM's own": same(drawn, of_vllm),
            "distribution": all(
                one.logprobs == pytest.approx(expected_logprobs(directory, request, one, 2), abs=5e-5)
                for request, one in zip(asked, whole, strict=True)
            ),
        }
        checks |= {name for name, holds in results.items() if not holds}
    return checks


def test_our_draws_in_vllm_s_engine_depend_on_keys_alone_and_have_its_log_probs(cluster, sized):  # noqa: F811
    """With options of sampling, preempted requests, and prompts in pieces, of which vLLM discards a draw."""
    directory, tokens = sized("qwen3"), {}
    for case in ("plain", "preempted", "chunked"):
        (seen,) = cluster.run(drawn_here, "megatron:d1", directory, case, SAMPLINGS, "")
        assert failed(seen, directory) == set(), case
        tokens[case] = [one.token_ids for _, whole, *_ in seen.values() for one in whole]
    assert tokens["plain"] == tokens["preempted"] == tokens["chunked"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slip_in_our_sampler_is_seen(cluster, sized, fault):  # noqa: F811
    directory, name = sized("qwen3"), "top_p" if fault == "top-p left out" else "plain"
    samplings = {name: SAMPLINGS[name]}
    (seen,) = cluster.run(drawn_here, "megatron:d1", directory, "chunked", samplings, fault)
    if FAULTS[fault][1] == "refused":
        assert "belong to other tokens than its response" in seen
    elif FAULTS[fault][1] == "in pieces":
        (right,) = cluster.run(drawn_here, "megatron:d1", directory, "plain", samplings, "")
        assert [one.token_ids for one in right[name][1]] != [one.token_ids for one in seen[name][1]]
    else:
        assert FAULTS[fault][1] in failed(seen, directory)
