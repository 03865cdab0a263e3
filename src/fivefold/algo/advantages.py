"""Rewards of all samples of a step -> advantages_N."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from fivefold.errors import RunError
from fivefold.lazy import Tensor, torch


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage: one entry per sample of the whole step, the same on every rank."""

    rewards_N: Tensor
    group_N: Tensor
    """Index of the prompt that a sample belongs to, from 0."""
    lengths_N: Tensor
    """Response lengths in tokens."""
    greedy_rewards_N: Tensor | None = None
    """Reward of the most likely response to the same prompt; None if the advantage does not need it."""
    truncated_N: Tensor | None = None
    """Whether a response was cut off at the maximum length."""
    expert_N: Tensor | None = None
    """Whether a response is an expert's; such a response is not compared with others."""
    unrewarded_N: Tensor | None = None
    """Whether the reward of a response was 0 before it was shaped."""

    def select(self, chosen_N: Tensor) -> AdvantageInputs:
        """Return the inputs of the chosen samples, none of which is an expert's."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        chosen = {name: None if value is None else value[chosen_N] for name, value in columns.items()}
        _, group_N = self.group_N[chosen_N].unique(return_inverse=True)
        return replace(self, **{**chosen, "group_N": group_N, "expert_N": None})

    def group_sums(self, values_N: Tensor) -> Tensor:
        """[N] sum over the group of each sample, in float64."""
        groups = int(self.group_N.max()) + 1 if len(self.group_N) else 0
        return torch.zeros(groups).double().index_add(0, self.group_N, values_N.double())[self.group_N]

    def group_extremes(self, kind: str) -> Tensor:
        """[N] largest (amax) or smallest (amin) reward in the group of each sample, in float64."""
        empty = torch.zeros(int(self.group_N.max()) + 1 if len(self.group_N) else 0).double()
        extremes = empty.scatter_reduce(0, self.group_N, self.rewards_N.double(), kind, include_self=False)
        return extremes[self.group_N]

    @property
    def count_N(self) -> Tensor:
        """Number of samples in the group of each sample."""
        return self.group_sums(torch.ones_like(self.group_N))

    @property
    def differ_N(self) -> Tensor:
        """Whether the rewards differ within the group of each sample."""
        # The mean is rounded, so equal rewards may differ from it; compare the extremes instead.
        return self.group_extremes("amax") != self.group_extremes("amin")

    @property
    def centred_N(self) -> Tensor:
        """Reward minus the group mean: exactly 0 if all rewards of the group are equal, however the mean is rounded."""
        return (self.rewards_N.double() - self.group_sums(self.rewards_N) / self.count_N) * self.differ_N

    def divided(self, advantages_N: Tensor, by: str, eps: float) -> Tensor:
        """[N] advantages / (divisor + eps), and the advantages as they are where the divisor is not above eps: equal rewards
        have no deviation to compare with."""
        if by == "none":
            return advantages_N.float()
        divisor_N = self._divisor(by)
        return torch.where(divisor_N > eps, advantages_N / (divisor_N + eps), advantages_N).float()

    def _divisor(self, over: str) -> Tensor:
        """[N] the unbiased standard deviation of rewards in the sample's group or in the whole step, or the group mean."""
        if over == "mean":
            return self.group_sums(self.rewards_N) / self.count_N
        if over == "batch":
            one = self.rewards_N.double().std() if len(self.rewards_N) > 1 else torch.zeros(())
            return one.expand(len(self.rewards_N))
        return (self.group_sums(self.centred_N.square()) / (self.count_N - 1).clamp(min=1)).sqrt()


Advantage = Callable[[AdvantageInputs], "Tensor"]
"""AdvantageInputs -> advantages_N."""


@dataclass(frozen=True)
class GroupNorm:
    """(r - mean of its group) / (std + eps): GRPO, DeepSeekMath (2402.03300) section 4.1.2.

    The standard deviation is the unbiased one (n - 1). A group of one has nothing to compare with and gives 0. Rewards that
    are all equal have no deviation: with a shifted baseline their advantage is not divided.
    """

    normalize: str = "group"
    """Divisor. `none`: no division, Dr. GRPO (2503.20783) equation 2. `batch`: the std of all rewards of the step. `mean`:
    the group mean, MaxRL (2602.02710), for rewards that are not negative: a negative mean would reverse all signs."""
    shift: float = 0.0
    """Added to the mean; AsymRE (2506.20520) uses a value below 0."""
    over_step: bool = False
    """Whether rewards are compared with the mean of all samples of the step instead of the group."""
    eps: float = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        compared = replace(inputs, group_N=torch.zeros_like(inputs.group_N)) if self.over_step else inputs
        advantages_N = compared.centred_N - self.shift * (compared.count_N > 1)
        if self.normalize == "mean" and (inputs.rewards_N < 0).any():
            lowest = float(inputs.rewards_N.min())
            raise RunError(
                f"algorithm.normalize: mean divides by the mean reward, so no reward may be negative: got {lowest:g}"
            )
        return inputs.divided(advantages_N, self.normalize, self.eps)


@dataclass(frozen=True)
class LogMeanExp:
    """r - τ log mean e^(r / τ) of its group: OPMD with the exact baseline (Trinity-RFT, 2505.17826). A group of one gives
    0."""

    temperature: float = 1.0
    over_step: bool = False
    """Whether the baseline is over all samples of the step instead of the group."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        if self.over_step:
            inputs = replace(inputs, group_N=torch.zeros_like(inputs.group_N))
        # Subtracting the maximum first keeps the exponential from overflowing.
        best_N = inputs.group_extremes("amax")
        mean_N = inputs.group_sums(((inputs.rewards_N - best_N) / self.temperature).exp()) / inputs.count_N
        return (inputs.rewards_N - best_N - self.temperature * mean_N.log()).float()


@dataclass(frozen=True)
class LeaveOneOut:
    """r - mean of the other rewards of its group: RLOO (2402.14740). A group of one gives 0.

    Normalized as in NeMo-RL: by the std where there is one, otherwise not at all.
    """

    normalize: str = "none"
    eps: float = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        # r - (sum - r) / (n - 1) = n / (n - 1) · (r - mean)
        advantages_N = inputs.centred_N * inputs.count_N / (inputs.count_N - 1).clamp(min=1)
        return inputs.divided(advantages_N, self.normalize, self.eps)


@dataclass(frozen=True)
class PassAtK:
    """Best - second-best reward of the group for the best response, 0 for the others: the gradient of max@k (2503.19595)."""

    normalize: str = "none"
    eps: float = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        advantages_N = torch.zeros(len(inputs.rewards_N)).double()
        for group in inputs.group_N.unique():
            members = (inputs.group_N == group).nonzero()[:, 0]
            if len(members) > 1:
                best = inputs.rewards_N[members].double().topk(2)
                advantages_N[members[best.indices[0]]] = best.values[0] - best.values[1]
        return inputs.divided(advantages_N, self.normalize, self.eps)


def length_weighted(inputs: AdvantageInputs) -> Tensor:
    """r - Σ length·r / Σ length of its group: OPO's minimum-variance baseline (2505.23585)."""
    weighted_N = inputs.group_sums(inputs.rewards_N * inputs.lengths_N)
    baseline_N = weighted_N / inputs.group_sums(inputs.lengths_N).clamp(min=1)
    return ((inputs.rewards_N.double() - baseline_N) * inputs.differ_N).float()


def group_scaled(inputs: AdvantageInputs) -> Tensor:
    """(r - mean of its group) · samples / samples in groups whose rewards differ: GPG (2504.02546)."""
    return (inputs.centred_N * len(inputs.rewards_N) / inputs.differ_N.sum().clamp(min=1)).float()


def nonzero_scaled(inputs: AdvantageInputs) -> Tensor:
    """(r - mean of its group) · samples / samples with a nonzero reward: verl's version of GPG (core_algos.py)."""
    return (inputs.centred_N * len(inputs.rewards_N) / (inputs.rewards_N != 0).sum().clamp(min=1)).float()


def greedy_baseline(inputs: AdvantageInputs) -> Tensor:
    """r - reward of the most likely response: ReMax (2310.10505)."""
    assert inputs.greedy_rewards_N is not None
    return (inputs.rewards_N.double() - inputs.greedy_rewards_N).float()


def reward(inputs: AdvantageInputs) -> Tensor:
    """r unchanged, for methods whose baseline is a critic or the whole step."""
    return inputs.rewards_N.float()


ADVANTAGES: dict[str, bool] = {
    "reward": False,
    "group": True,
    "leave_one_out": True,
    "length_weighted": True,
    "group_scaled": True,
    "pass_at_k": True,
    "greedy_baseline": False,
    "log_mean_exp": True,
    "nonzero_scaled": True,
    "step_log_mean_exp": False,
    "step_mean": False,
}
"""Advantage -> whether it compares the samples of a group."""
NORMALIZED_BY_MEAN = ("group",)
"""Advantages that `normalize: mean` applies to."""
NORMALIZED = ("group", "leave_one_out", "pass_at_k", "step_mean")
"""Advantages that `normalize` applies to."""

SCALED = ("group_scaled", "nonzero_scaled", "pass_at_k")
"""Advantages that are more than the reward less a baseline, also without `normalize`."""


def make_advantage(
    name: str, normalize: str, baseline_shift: float | None = None, baseline_temperature: float | None = None
) -> Advantage:
    """Return the advantage `name`. Parameters left out keep their defaults."""
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
