"""Groups -> packed TokenBatch, and the plan of micro-batches."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from fivefold.types import Group, TokenBatch


def pack(groups: list[Group], temperature: float, sampled: bool, samples_per_comparison: int = 1) -> TokenBatch:
    """Lay the samples of `groups` end to end: prompt, then response; `sampled` ones have log-probs of an engine."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    rollout_logprobs: list[float] = []
    lengths: list[int] = []
    for group in groups:
        prompt_ids = group.prompt.token_ids
        for sample in group.samples:
            assert len(sample.logprobs) == (len(sample.token_ids) if sampled else 0)
            token_ids += prompt_ids + sample.token_ids
            learned_of_response = [True] * len(sample.token_ids) if sample.loss_mask is None else sample.loss_mask
            loss_mask += [False] * len(prompt_ids) + learned_of_response
            rollout_logprobs += [0.0] * len(prompt_ids) + (sample.logprobs if sampled else [0.0] * len(sample.token_ids))
            lengths.append(len(prompt_ids) + len(sample.token_ids))
    return TokenBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.long),
        loss_mask_T=torch.tensor(loss_mask, dtype=torch.bool),
        lengths_N=lengths,
        temperature=temperature,
        rollout_logprobs_T=torch.tensor(rollout_logprobs, dtype=torch.float32) if sampled else None,
        samples_per_comparison=samples_per_comparison,
    )


def expand_to_tokens(values_N: Tensor, batch: TokenBatch) -> Tensor:
    """A number a sample -> the same number on each of its response tokens, 0 on the prompt."""
    lengths_N = torch.tensor(batch.lengths_N, dtype=torch.long)
    return torch.repeat_interleave(values_N.float(), lengths_N) * batch.loss_mask_T


def micro_batches_needed(lengths_N: list[int], budget: int) -> int:
    """Fewest micro-batches of at most `budget` tokens that `plan_micro_batches` can fill; at least 1."""
    count = max(1, -(-sum(lengths_N) // budget))
    while max(_loads(lengths_N, plan_micro_batches(lengths_N, count)), default=0) > budget and count < len(lengths_N):
        count += 1
    return count


def plan_micro_batches(lengths_N: list[int], count: int) -> list[list[int]]:
    """Samples of each of `count` micro-batches, balanced in tokens (longest first); some may be empty."""
    plan: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for sample in sorted(range(len(lengths_N)), key=lambda i: (-lengths_N[i], i)):
        load, lightest = heapq.heappop(heap)
        plan[lightest].append(sample)
        heapq.heappush(heap, (load + lengths_N[sample], lightest))
    return plan


def _loads(lengths_N: list[int], plan: list[list[int]]) -> list[int]:
    return [sum(lengths_N[i] for i in samples) for samples in plan]
