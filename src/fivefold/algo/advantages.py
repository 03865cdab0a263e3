"""rewards_N, group_N, lengths_N -> advantages_N, over all samples of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    def __call__(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        """`group_N` numbers the group of each sample, from 0; `lengths_N` are the tokens of the responses."""
        ...


def _group_sums(values_N: Tensor, group_N: Tensor) -> Tensor:
    """The sum over its group, for each sample, in float64."""
    groups = int(group_N.max()) + 1 if len(group_N) else 0
    return torch.zeros(groups).double().index_add(0, group_N, values_N.double())[group_N]


@dataclass(frozen=True)
class GroupNorm:
    """(r - mean of its group) / (std of its group + eps): GRPO, DeepSeekMath (2402.03300) section 4.1.2.

    The standard deviation is the unbiased one (n - 1). A group of one has nothing to compare with and gives 0.
    """

    by_std: bool = True
    """False leaves the division out: Dr. GRPO (2503.20783) equation 2."""
    eps: float = 1e-6

    def __call__(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        count_N = _group_sums(torch.ones_like(rewards_N), group_N)
        centred_N = rewards_N.double() - _group_sums(rewards_N, group_N) / count_N
        if not self.by_std:
            return centred_N.float()
        std_N = (_group_sums(centred_N.square(), group_N) / (count_N - 1).clamp(min=1)).sqrt()
        return (centred_N / (std_N + self.eps)).float()


@dataclass(frozen=True)
class LeaveOneOut:
    """r - mean of the others of its group: RLOO (2402.14740). A group of one gives 0."""

    def __call__(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        count_N = _group_sums(torch.ones_like(rewards_N), group_N)
        others_N = _group_sums(rewards_N, group_N) - rewards_N.double()
        advantages_N = rewards_N.double() - others_N / (count_N - 1).clamp(min=1)
        return torch.where(count_N > 1, advantages_N, 0.0).float()


@dataclass(frozen=True)
class LengthWeighted:
    """r - Σ length·r / Σ length of its group: OPO's baseline of least variance (2505.23585)."""

    def __call__(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        baseline_N = _group_sums(rewards_N * lengths_N, group_N) / _group_sums(lengths_N, group_N).clamp(min=1)
        return (rewards_N.double() - baseline_N).float()


@dataclass(frozen=True)
class GroupMeanScaled:
    """(r - mean of its group) · samples / samples whose group is not all alike: GPG (2504.02546)."""

    def __call__(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        centred_N = GroupNorm(by_std=False)(rewards_N, group_N, lengths_N).double()
        told_N = _group_sums(centred_N.abs(), group_N) > 0
        return (centred_N * len(rewards_N) / told_N.sum().clamp(min=1)).float()


@dataclass(frozen=True)
class Ones:
    """Every sample counts alike: supervised learning on given completions."""

    def __call__(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        return torch.ones_like(rewards_N, dtype=torch.float32)
