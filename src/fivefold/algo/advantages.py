"""rewards_N, group_N -> advantages_N."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    def __call__(self, rewards_N: Tensor, group_N: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class GroupNorm:
    """(r - mean of its group) / (std of its group + eps): GRPO, DeepSeekMath (2402.03300) section 4.1.2.

    The standard deviation is the unbiased one (n - 1). A group of one has nothing to compare with and gives 0.
    """

    by_std: bool = True
    """False leaves the division out: Dr. GRPO (2503.20783) equation 2."""
    eps: float = 1e-6

    def __call__(self, rewards_N: Tensor, group_N: Tensor) -> Tensor:
        """`group_N` numbers the group of each sample, from 0."""
        groups = int(group_N.max()) + 1 if len(group_N) else 0
        rewards_N = rewards_N.double()
        count_P = torch.bincount(group_N, minlength=groups).double()
        mean_P = torch.zeros(groups).double().index_add(0, group_N, rewards_N) / count_P.clamp(min=1)
        centred_N = rewards_N - mean_P[group_N]
        if not self.by_std:
            return centred_N.float()
        squares_P = torch.zeros(groups).double().index_add(0, group_N, centred_N.square())
        std_P = (squares_P / (count_P - 1).clamp(min=1)).sqrt()
        return (centred_N / (std_P[group_N] + self.eps)).float()


@dataclass(frozen=True)
class Ones:
    """Every sample counts alike: supervised learning on given completions."""

    def __call__(self, rewards_N: Tensor, group_N: Tensor) -> Tensor:
        return torch.ones_like(rewards_N, dtype=torch.float32)
