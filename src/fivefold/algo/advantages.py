"""Scores of all samples of a step -> advantages_N."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What advantages are made of: one entry a sample of the whole step, the same on every rank."""

    rewards_N: Tensor
    group_N: Tensor
    """Number of the prompt that a sample belongs to, from 0."""
    lengths_N: Tensor
    """Tokens of the responses."""
    greedy_rewards_N: Tensor | None = None
    """Reward of the most likely response to the same prompt, where the advantage needs it."""

    def group_sums(self, values_N: Tensor) -> Tensor:
        """The sum over its group, for each sample, in float64."""
        groups = int(self.group_N.max()) + 1 if len(self.group_N) else 0
        return torch.zeros(groups).double().index_add(0, self.group_N, values_N.double())[self.group_N]

    @property
    def count_N(self) -> Tensor:
        """Samples of its group, for each sample."""
        return self.group_sums(torch.ones_like(self.group_N))

    @property
    def centred_N(self) -> Tensor:
        return self.rewards_N.double() - self.group_sums(self.rewards_N) / self.count_N

    def spread_N(self, over: str) -> Tensor:
        """The unbiased standard deviation of the rewards in the group of each sample, or in the whole step."""
        if over == "batch":
            one = self.rewards_N.double().std() if len(self.rewards_N) > 1 else torch.zeros(())
            return one.expand(len(self.rewards_N))
        return (self.group_sums(self.centred_N.square()) / (self.count_N - 1).clamp(min=1)).sqrt()


Advantage = Callable[[Scores], Tensor]
"""Scores -> advantages_N."""


@dataclass(frozen=True)
class Group:
    """(r - mean of its group) / (std + eps): GRPO, DeepSeekMath (2402.03300) section 4.1.2.

    The standard deviation is the unbiased one (n - 1). A group of one has nothing to compare with and gives 0.
    """

    normalize: str = "group"
    """`none` leaves the division out: Dr. GRPO (2503.20783) equation 2; `batch` takes the std of all rewards of the step."""
    eps: float = 1e-6

    def __call__(self, scores: Scores) -> Tensor:
        if self.normalize == "none":
            return scores.centred_N.float()
        return (scores.centred_N / (scores.spread_N(self.normalize) + self.eps)).float()


@dataclass(frozen=True)
class LeaveOneOut:
    """r - mean of the others of its group: RLOO (2402.14740). A group of one gives 0.

    Normalised as NeMo-RL does: by the std where there is one, otherwise not at all.
    """

    normalize: str = "none"
    eps: float = 1e-6

    def __call__(self, scores: Scores) -> Tensor:
        # r - (sum - r) / (n - 1) = n / (n - 1) · (r - mean)
        advantages_N = scores.centred_N * scores.count_N / (scores.count_N - 1).clamp(min=1)
        if self.normalize == "none":
            return advantages_N.float()
        std_N = scores.spread_N(self.normalize)
        return torch.where(std_N > 0, advantages_N / (std_N + self.eps), advantages_N).float()


@dataclass(frozen=True)
class PassAtK:
    """Best - second best of its group for the best response, 0 for the others: the gradient of max@k (2503.19595)."""

    normalize: str = "none"
    eps: float = 1e-6

    def __call__(self, scores: Scores) -> Tensor:
        advantages_N = torch.zeros(len(scores.rewards_N)).double()
        for group in scores.group_N.unique():
            members = (scores.group_N == group).nonzero()[:, 0]
            if len(members) > 1:
                best = scores.rewards_N[members].double().topk(2)
                advantages_N[members[best.indices[0]]] = best.values[0] - best.values[1]
        if self.normalize != "none":
            advantages_N = advantages_N / (scores.spread_N(self.normalize) + self.eps)
        return advantages_N.float()


def length_weighted(scores: Scores) -> Tensor:
    """r - Σ length·r / Σ length of its group: OPO's baseline of least variance (2505.23585)."""
    weighted_N = scores.group_sums(scores.rewards_N * scores.lengths_N)
    return (scores.rewards_N.double() - weighted_N / scores.group_sums(scores.lengths_N).clamp(min=1)).float()


def group_scaled(scores: Scores) -> Tensor:
    """(r - mean of its group) · samples / samples whose group is not all alike: GPG (2504.02546)."""

    def extreme(kind: str) -> Tensor:
        empty = torch.zeros(int(scores.group_N.max()) + 1).double()
        return empty.scatter_reduce(0, scores.group_N, scores.rewards_N.double(), kind, include_self=False)[scores.group_N]

    # Not compared with the mean, which is rounded: equal rewards need not be equal to it.
    told_N = extreme("amax") != extreme("amin")
    return (scores.centred_N * len(scores.rewards_N) / told_N.sum().clamp(min=1)).float()


def greedy_baseline(scores: Scores) -> Tensor:
    """r - reward of the most likely response: ReMax (2310.10505)."""
    assert scores.greedy_rewards_N is not None
    return (scores.rewards_N.double() - scores.greedy_rewards_N).float()


def reward(scores: Scores) -> Tensor:
    """The reward as it is: a critic or the whole step is what it is compared with."""
    return scores.rewards_N.float()


def make_advantage(name: str, normalize: str) -> Advantage:
    """The advantage of this name."""
    kinds: dict[str, Advantage] = {
        "reward": reward,
        "given": reward,
        "group": Group(normalize),
        "leave_one_out": LeaveOneOut(normalize),
        "pass_at_k": PassAtK(normalize),
        "length_weighted": length_weighted,
        "group_scaled": group_scaled,
        "greedy_baseline": greedy_baseline,
    }
    return kinds[name]
