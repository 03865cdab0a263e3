"""Scores of all samples of a step -> advantages_N."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are made of: one entry a sample of the whole step, the same on every rank."""

    rewards_N: Tensor
    group_N: Tensor
    """Number of the prompt that a sample belongs to, from 0."""
    lengths_N: Tensor
    """Tokens of the responses."""
    greedy_rewards_N: Tensor | None = None
    """Reward of the most likely response to the same prompt, where the advantage needs it."""
    truncated_N: Tensor | None = None
    """Whether a response was cut off at the longest length."""
    expert_N: Tensor | None = None
    """An expert's response, which is compared with none."""

    def select(self, chosen_N: Tensor) -> AdvantageInputs:
        """Those of these samples, none of which is an expert's."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        chosen = {name: None if value is None else value[chosen_N] for name, value in columns.items()}
        _, group_N = self.group_N[chosen_N].unique(return_inverse=True)
        return replace(self, **{**chosen, "group_N": group_N, "expert_N": None})

    def group_sums(self, values_N: Tensor) -> Tensor:
        """The sum over its group, for each sample, in float64."""
        groups = int(self.group_N.max()) + 1 if len(self.group_N) else 0
        return torch.zeros(groups).double().index_add(0, self.group_N, values_N.double())[self.group_N]

    def group_extremes(self, kind: str) -> Tensor:
        """The largest (amax) or smallest (amin) reward of its group, for each sample, in float64."""
        empty = torch.zeros(int(self.group_N.max()) + 1 if len(self.group_N) else 0).double()
        found = empty.scatter_reduce(0, self.group_N, self.rewards_N.double(), kind, include_self=False)
        return found[self.group_N]

    @property
    def count_N(self) -> Tensor:
        """Samples of its group, for each sample."""
        return self.group_sums(torch.ones_like(self.group_N))

    @property
    def differ_N(self) -> Tensor:
        """Whether the rewards of its group differ, for each sample."""
        # Not compared with the mean, which is rounded: equal rewards need not be equal to it.
        return self.group_extremes("amax") != self.group_extremes("amin")

    @property
    def centred_N(self) -> Tensor:
        """Reward less the mean of its group: exactly 0 where all of the group are equal, whatever the mean is rounded to."""
        return (self.rewards_N.double() - self.group_sums(self.rewards_N) / self.count_N) * self.differ_N

    def scale_N(self, over: str) -> Tensor:
        """The unbiased standard deviation of the rewards in the group of each sample or in the whole step, or their mean
        in the group."""
        if over == "mean":
            return self.group_sums(self.rewards_N) / self.count_N
        if over == "batch":
            one = self.rewards_N.double().std() if len(self.rewards_N) > 1 else torch.zeros(())
            return one.expand(len(self.rewards_N))
        return (self.group_sums(self.centred_N.square()) / (self.count_N - 1).clamp(min=1)).sqrt()


Advantage = Callable[[AdvantageInputs], Tensor]
"""Scores -> advantages_N."""


@dataclass(frozen=True)
class GroupNorm:
    """(r - mean of its group) / (std + eps): GRPO, DeepSeekMath (2402.03300) section 4.1.2.

    The standard deviation is the unbiased one (n - 1). A group of one has nothing to compare with and gives 0.
    """

    normalize: str = "group"
    """`none` leaves the division out: Dr. GRPO (2503.20783) equation 2; `batch` takes the std of all rewards of the step;
    `mean` divides by the mean of the group instead: MaxRL (2602.02710)."""
    shift: float = 0.0
    """Added to the mean: AsymRE (2506.20520) takes it below 0."""
    over_step: bool = False
    """Compare with the mean of all samples of the step instead."""
    eps: float = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        compared = replace(inputs, group_N=torch.zeros_like(inputs.group_N)) if self.over_step else inputs
        advantages_N = compared.centred_N - self.shift * (compared.count_N > 1)
        if self.normalize == "none":
            return advantages_N.float()
        return (advantages_N / (inputs.scale_N(self.normalize) + self.eps)).float()


@dataclass(frozen=True)
class LogMeanExp:
    """r - τ log mean e^(r / τ) of its group: OPMD with the exact baseline (Trinity-RFT, 2505.17826). One alone gives 0."""

    temperature: float = 1.0
    over_step: bool = False
    """Of all samples of the step instead."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        if self.over_step:
            inputs = replace(inputs, group_N=torch.zeros_like(inputs.group_N))
        # e^((r - r_max) / τ) cannot overflow.
        best_N = inputs.group_extremes("amax")
        mean_N = inputs.group_sums(((inputs.rewards_N - best_N) / self.temperature).exp()) / inputs.count_N
        return (inputs.rewards_N - best_N - self.temperature * mean_N.log()).float()


@dataclass(frozen=True)
class LeaveOneOut:
    """r - mean of the others of its group: RLOO (2402.14740). A group of one gives 0.

    Normalised as NeMo-RL does: by the std where there is one, otherwise not at all.
    """

    normalize: str = "none"
    eps: float = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        # r - (sum - r) / (n - 1) = n / (n - 1) · (r - mean)
        advantages_N = inputs.centred_N * inputs.count_N / (inputs.count_N - 1).clamp(min=1)
        if self.normalize == "none":
            return advantages_N.float()
        std_N = inputs.scale_N(self.normalize)
        return torch.where(std_N > 0, advantages_N / (std_N + self.eps), advantages_N).float()


@dataclass(frozen=True)
class PassAtK:
    """Best - second best of its group for the best response, 0 for the others: the gradient of max@k (2503.19595)."""

    normalize: str = "none"
    eps: float = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        advantages_N = torch.zeros(len(inputs.rewards_N)).double()
        for group in inputs.group_N.unique():
            members = (inputs.group_N == group).nonzero()[:, 0]
            if len(members) > 1:
                best = inputs.rewards_N[members].double().topk(2)
                advantages_N[members[best.indices[0]]] = best.values[0] - best.values[1]
        if self.normalize != "none":
            advantages_N = advantages_N / (inputs.scale_N(self.normalize) + self.eps)
        return advantages_N.float()


def length_weighted(inputs: AdvantageInputs) -> Tensor:
    """r - Σ length·r / Σ length of its group: OPO's baseline of least variance (2505.23585)."""
    weighted_N = inputs.group_sums(inputs.rewards_N * inputs.lengths_N)
    baseline_N = weighted_N / inputs.group_sums(inputs.lengths_N).clamp(min=1)
    return ((inputs.rewards_N.double() - baseline_N) * inputs.differ_N).float()


def group_scaled(inputs: AdvantageInputs) -> Tensor:
    """(r - mean of its group) · samples / samples whose group is not all alike: GPG (2504.02546)."""
    return (inputs.centred_N * len(inputs.rewards_N) / inputs.differ_N.sum().clamp(min=1)).float()


def nonzero_scaled(inputs: AdvantageInputs) -> Tensor:
    """(r - mean of its group) · samples / samples whose reward is not 0: what verl calls GPG (core_algos.py)."""
    return (inputs.centred_N * len(inputs.rewards_N) / (inputs.rewards_N != 0).sum().clamp(min=1)).float()


def greedy_baseline(inputs: AdvantageInputs) -> Tensor:
    """r - reward of the most likely response: ReMax (2310.10505)."""
    assert inputs.greedy_rewards_N is not None
    return (inputs.rewards_N.double() - inputs.greedy_rewards_N).float()


def reward(inputs: AdvantageInputs) -> Tensor:
    """The reward as it is: a critic or the whole step is what it is compared with."""
    return inputs.rewards_N.float()


def make_advantage(
    name: str, normalize: str, baseline_shift: float | None = None, baseline_temperature: float | None = None
) -> Advantage:
    """The advantage of this name; numbers left out are its own."""
    kinds: dict[str, Advantage] = {
        "reward": reward,
        "group": GroupNorm(normalize, baseline_shift or 0.0),
        "step_mean": GroupNorm(normalize, over_step=True),
        "leave_one_out": LeaveOneOut(normalize),
        "pass_at_k": PassAtK(normalize),
        "length_weighted": length_weighted,
        "group_scaled": group_scaled,
        "greedy_baseline": greedy_baseline,
        "log_mean_exp": LogMeanExp(baseline_temperature or 1.0),
        "step_log_mean_exp": LogMeanExp(baseline_temperature or 1.0, over_step=True),
        "nonzero_scaled": nonzero_scaled,
    }
    return kinds[name]
