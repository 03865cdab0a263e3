"""What tests of engines share: requests, and the log-prob of every token written out with transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fivefold.distributed.processes import shared_memory_of
from fivefold.engines.sampling import request_seed
from fivefold.types import Completion, Request, Sampling

PROMPTS = [list(range(5, 5 + n)) for n in (3, 9, 1, 5)]
SAMPLING = Sampling(max_tokens=24, temperature=0.7)


def requests(count: int, sampling: Sampling = SAMPLING, prompts=PROMPTS, draw=(5, 2)) -> list[Request]:
    """`count` to each prompt, numbered prompt by prompt."""
    return [
        Request(i * count + k, prompt, sampling, request_seed((*draw, i, k)))
        for i, prompt in enumerate(prompts)
        for k in range(count)
    ]


def complete(engine: Any, asked: list[Request]) -> list[Completion]:
    """In the order of the requests."""
    found = {completion.request_id: completion for completion in engine.generate(asked)}
    assert len(found) == len(asked)
    return [found[request.id] for request in asked]


def named_blocks(pids: Iterable[int]) -> set[Path]:
    """The shared memory of these processes that has a name."""
    return {Path("/dev/shm", name) for pid in pids for name in shared_memory_of(pid)}


def own_logits(model: Path, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Those that each token of the response was drawn from, by one forward of transformers."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    with torch.no_grad():
        return reference(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]


OPTIONS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": ((7, 4.0), (9, -100.0))},
    "min_tokens": {"min_tokens": 20, "logit_bias": ((1, 6.0),)},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5, "logit_bias": ((7, 2.0),), "min_tokens": 4},
}


def expected_logprobs(model: Path, request: Request, found: Completion, eos: int) -> list[float]:
    """Those of the distribution that each token was drawn from, by transformers' own processors where it has one."""
    from transformers.generation import logits_process as theirs

    given = request.sampling
    raw, expected = own_logits(model, request.prompt_ids, found.token_ids), []
    for place, token in enumerate(found.token_ids):
        before = torch.tensor([request.prompt_ids + found.token_ids[:place]])
        scores = raw[place][None].clone()
        for biased, bias in given.logit_bias:
            scores[0, biased] += bias
        if place < given.min_tokens:
            scores[0, [*([] if given.ignore_eos else [eos]), *given.stop_token_ids]] = -torch.inf
        if given.repetition_penalty != 1:
            scores = theirs.RepetitionPenaltyLogitsProcessor(given.repetition_penalty)(before, scores)
        scores = scores / (given.temperature or 1.0)
        if given.min_p:
            scores = theirs.MinPLogitsWarper(given.min_p)(before, scores)
        if given.top_k:
            scores = theirs.TopKLogitsWarper(given.top_k)(before, scores)
        if given.top_p < 1:
            scores = theirs.TopPLogitsWarper(given.top_p)(before, scores)
        expected.append(float(torch.log_softmax(scores, -1)[0, token]))
    return expected
