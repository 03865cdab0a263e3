"""Prompts -> scored groups on the replica that owns them, and the numbers of all samples on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fivefold.ranks import Ranks
from fivefold.surfaces import Engine
from fivefold.types import Group, Prompt, Sample, Sampling


class Scorer(Protocol):
    """Sets reward, reward_parts and reward_failed of every sample."""

    def score(self, groups: list[Group]) -> None: ...

    def close(self) -> None: ...


def sample_groups(engine: Engine, ranks: Ranks, prompts: list[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
    """Groups of this rank's part of the prompts."""
    _, own = ranks.share(prompts)
    return engine.generate(own, group_size, sampling) if own else []


def given_groups(ranks: Ranks, prompts: list[Prompt], encode: Callable[[str], list[int]], limit: int) -> list[Group]:
    """Groups of one sample, the completion that stands in the data, for this rank's part of the prompts."""
    _, own = ranks.share(prompts)
    groups = []
    for prompt in own:
        assert prompt.response is not None
        token_ids = encode(prompt.response)
        sample = Sample(
            token_ids[:limit], [], prompt.response, finished=len(token_ids) <= limit, policy_version=0, reward=1.0
        )
        groups.append(Group(prompt, [sample]))
    return groups


@dataclass(frozen=True)
class SampleTable:
    """One row a sample of the whole step, in the order of the prompts, the same on every rank."""

    samples_per_prompt: int
    rewards_N: Tensor
    response_lengths_N: Tensor
    prompt_lengths_N: Tensor
    finished_N: Tensor
    failed_N: Tensor
    parts: dict[str, float]
    """Mean of each part of the reward, over the samples that have it."""

    @property
    def group_N(self) -> Tensor:
        return torch.arange(len(self.rewards_N)) // self.samples_per_prompt

    def metrics(self) -> dict[str, float]:
        rewards, lengths = self.rewards_N, self.response_lengths_N.double()
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()) if len(rewards) > 1 else 0.0,
            "reward/max": float(rewards.max()),
            "reward/failed": float(self.failed_N.sum()),
            **{f"reward/{name}": value for name, value in self.parts.items()},
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/truncated_fraction": float(1 - self.finished_N.double().mean()),
            "prompt/length_mean": float(self.prompt_lengths_N.double().mean()),
        }


def tabulate(ranks: Ranks, groups: list[Group]) -> SampleTable:
    """The table of all replicas' samples from this replica's groups."""
    rows = ranks.gather_all([_rows(group) for group in groups])
    flat = [row for group in rows for row in group]
    values: dict[str, list[float]] = {}
    for row in flat:
        for name, value in row.parts.items():
            values.setdefault(name, []).append(value)
    return SampleTable(
        samples_per_prompt=len(rows[0]),
        rewards_N=torch.tensor([row.reward for row in flat], dtype=torch.float64),
        response_lengths_N=torch.tensor([row.response_length for row in flat]),
        prompt_lengths_N=torch.tensor([row.prompt_length for row in flat]),
        finished_N=torch.tensor([row.finished for row in flat]),
        failed_N=torch.tensor([row.failed for row in flat]),
        parts={name: sum(numbers) / len(numbers) for name, numbers in sorted(values.items())},
    )


@dataclass(frozen=True)
class _Row:
    reward: float
    parts: dict[str, float]
    response_length: int
    prompt_length: int
    finished: bool
    failed: bool


def _rows(group: Group) -> list[_Row]:
    length = len(group.prompt.token_ids)
    return [_Row(s.reward, s.reward_parts, len(s.token_ids), length, s.finished, s.reward_failed) for s in group.samples]
