"""What tests of engines share: requests, and the log-prob of every token written out with transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

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


def complete(engine: Any, wanted: list[Request]) -> list[Completion]:
    """In the order of the requests."""
    completions = {completion.request_id: completion for completion in engine.generate(wanted)}
    assert len(completions) == len(wanted)
    return [completions[request.id] for request in wanted]


def named_blocks(pids: Iterable[int]) -> set[Path]:
    """The shared memory of these processes that has a name."""
    blocks = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            blocks |= {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}
    return {block for block in blocks if not block.name.endswith(" (deleted)")}


def own_logits(model: Path, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Those that each token of the response was drawn from, by one forward of transformers."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    with torch.no_grad():
        return reference(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]


OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": ((7, 4.0), (9, -100.0))},
    "min_tokens": {"min_tokens": 20, "logit_bias": ((1, 6.0),)},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5, "logit_bias": ((7, 2.0),), "min_tokens": 4},
}


def expected_logprobs(model: Path, request: Request, completion: Completion, eos: int) -> list[float]:
    """Those of the distribution that each token was drawn from, by transformers' own processors where it has one."""
    from transformers.generation import logits_process as theirs

    sampling = request.sampling
    raw, expected = own_logits(model, request.prompt_ids, completion.token_ids), []
    for place, token in enumerate(completion.token_ids):
        before = torch.tensor([request.prompt_ids + completion.token_ids[:place]])
        scores = raw[place][None].clone()
        for biased, bias in sampling.logit_bias:
            scores[0, biased] += bias
        if place < sampling.min_tokens:
            scores[0, [*([] if sampling.ignore_eos else [eos]), *sampling.stop_token_ids]] = -torch.inf
        if sampling.repetition_penalty != 1:
            scores = theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(before, scores)
        scores = scores / (sampling.temperature or 1.0)
        if sampling.min_p:
            scores = theirs.MinPLogitsWarper(sampling.min_p)(before, scores)
        if sampling.top_k:
            scores = theirs.TopKLogitsWarper(sampling.top_k)(before, scores)
        if sampling.top_p < 1:
            scores = theirs.TopPLogitsWarper(sampling.top_p)(before, scores)
        expected.append(float(torch.log_softmax(scores, -1)[0, token]))
    return expected
