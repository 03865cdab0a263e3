"""Prompts -> scored groups on the replica that owns them, and the numbers of all samples on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fivefold.algo.reward_shaping import repetition
from fivefold.distributed.ranks import Ranks
from fivefold.interfaces import Engine
from fivefold.types import Group, Prompt, Sample, Sampling


class Scorer(Protocol):
    """Sets reward, reward_parts, correct and reward_failed of every sample."""

    @property
    def first_error(self) -> str | None:
        """Why the first sample of the last call failed, if one did."""
        ...

    def score(self, groups: list[Group]) -> None: ...

    def close(self) -> None: ...


class Judge(Protocol):
    """Adds a model's score to the rewards of a replica's samples; called on all its ranks with the same groups."""

    def score(self, groups: list[Group]) -> None: ...


@dataclass(frozen=True)
class Rewards:
    """Everything that makes rewards."""

    scorer: Scorer
    judge: Judge | None = None
    max_failed: float = 0.1
    """Largest share of samples whose reward may fail."""
    say: Callable[[str], None] = print

    def scored(self, ranks: Ranks, groups: list[Group]) -> list[Group]:
        """The replica's groups with their rewards, from this rank's; RuntimeError on all ranks where too many fail."""
        self.scorer.score(groups)
        self._look_at_failures(ranks, groups)
        groups = ranks.all_gather_within_replica(groups)
        if self.judge is not None:
            self.judge.score(groups)
        return groups

    def _look_at_failures(self, ranks: Ranks, groups: list[Group]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        failed, total = ranks.all_reduce_sum_world([sum(sample.reward_failed for sample in samples), len(samples)])
        if not failed:
            return
        error = next(text for text in ranks.all_gather_world(self.scorer.first_error) if text is not None)
        told = f"the reward of {failed:.0f} of {total:.0f} samples failed; the first error:\n{error}"
        if failed > self.max_failed * total:
            raise RuntimeError(
                f"{told}\nreward.max_failed = {self.max_failed:g} is the largest share that a run goes on with"
            )
        self.say(told)


def sample_groups(engine: Engine, ranks: Ranks, prompts: list[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
    """Groups of this rank's part of the prompts."""
    _, own = ranks.shard(prompts)
    return engine.generate(own, group_size, sampling) if own else []


def compare_with_greedy(
    engine: Engine, ranks: Ranks, rewards: Rewards, prompts: list[Prompt], groups: list[Group], sampling: Sampling
) -> None:
    """Set `greedy_reward` of the replica's groups: the reward of the most likely response to each prompt."""
    greedy = sample_groups(engine, ranks, prompts, 1, replace(sampling, temperature=0.0, top_p=1.0, top_k=0))
    for group, other in zip(groups, rewards.scored(ranks, greedy), strict=True):
        group.greedy_reward = other.samples[0].reward


@dataclass(frozen=True)
class DynamicSampling:
    """Dynamic sampling: further prompts in the place of groups that tell nothing (DAPO, 2503.14476, section 3.2)."""

    rounds: int
    prompts_per_round: int

    def collect(
        self, needed: int, ranks: Ranks, sample: Callable[[int, int], list[Group]]
    ) -> tuple[list[Group], dict[str, float]]:
        """(this replica's groups, metrics); `sample(count, round)` gives the replica's scored groups of further prompts.

        After the last round groups whose samples all have the same reward fill up what is missing.
        """
        telling: list[Group] = []
        silent: list[Group] = []
        rounds = 0
        while len(telling) < needed and rounds < self.rounds:
            for group in ranks.all_gather_replicas(sample(self.prompts_per_round, rounds)):
                same = len({one.reward for one in group.samples}) == 1
                (silent if same else telling).append(group)
            rounds += 1
        sampled = len(telling) + len(silent)
        metrics = {
            "dynamic_sampling/rounds": float(rounds),
            "dynamic_sampling/prompts": float(sampled),
            "dynamic_sampling/kept_fraction": len(telling) / sampled,
            "dynamic_sampling/zero_variance_used": float(max(0, needed - len(telling))),
        }
        return (telling + silent)[:needed][ranks.coords.dp :: ranks.layout.dp], metrics


def groups_from_dataset(ranks: Ranks, prompts: list[Prompt]) -> list[Group]:
    """The replica's groups of the responses that stand in the data; where there are two, the first is the chosen one."""
    groups = []
    for prompt in ranks.shard(prompts)[0]:
        samples = [
            Sample(
                given.token_ids,
                [],
                given.text,
                not given.truncated,
                policy_version=0,
                loss_mask=given.loss_mask,
                reward=reward,
            )
            for given, reward in zip(prompt.responses, (1.0, 0.0), strict=False)
        ]
        groups.append(Group(prompt, samples))
    return groups


@dataclass(frozen=True)
class RolloutStats:
    """One row a sample of the whole step, in the order of the prompts, the same on every rank."""

    samples_per_prompt: int
    rewards_N: Tensor
    response_lengths_N: Tensor
    """Tokens that carry loss."""
    prompt_lengths_N: Tensor
    finished_N: Tensor
    failed_N: Tensor
    correct_N: Tensor
    repetition_N: Tensor
    greedy_rewards_N: Tensor | None
    parts: dict[str, float]
    """Mean of each part of the reward, over the samples that have it."""

    @property
    def group_N(self) -> Tensor:
        return torch.arange(len(self.rewards_N)) // self.samples_per_prompt

    def metrics(self, sampled: bool) -> dict[str, float]:
        """Numbers of the step; of rewards only where responses were `sampled`."""
        rewards, lengths, k = self.rewards_N, self.response_lengths_N.double(), self.samples_per_prompt
        found = {
            "response/length_mean": float(lengths.mean()),
            "response/length_std": float(lengths.std()) if len(lengths) > 1 else 0.0,
            "response/length_min": float(lengths.min()),
            "response/length_max": float(lengths.max()),
            "response/truncated_fraction": float(1 - self.finished_N.double().mean()),
            "prompt/length_mean": float(self.prompt_lengths_N.double().mean()),
        }
        if not sampled:
            return found
        found |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()) if len(rewards) > 1 else 0.0,
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/failed": float(self.failed_N.sum()),
            **{f"reward/{name}": value for name, value in self.parts.items()},
            "response/repetition": float(self.repetition_N.mean()),
        }
        for name, chosen in (("right", self.correct_N), ("wrong", ~self.correct_N)):
            if chosen.any():
                found[f"response/length_mean_{name}"] = float(lengths[chosen].mean())
        if k > 1:
            correct_PG, rewards_PG = self.correct_N.view(-1, k), rewards.view(-1, k)
            found |= {
                f"reward/mean@{k}": float(correct_PG.double().mean()),
                f"reward/pass@{k}": float(correct_PG.any(1).double().mean()),
                "reward/best": float(rewards_PG.amax(1).mean()),
                "reward/solve_all": float(correct_PG.all(1).double().mean()),
                "reward/solve_none": float((~correct_PG).all(1).double().mean()),
                "reward/frac_reward_zero_std": float((rewards_PG == rewards_PG[:, :1]).all(1).double().mean()),
            }
        return found


def gather_stats(ranks: Ranks, groups: list[Group]) -> RolloutStats:
    """The table of all replicas' samples from this replica's groups."""
    rows = ranks.all_gather_replicas([_rows(group) for group in groups])
    flat = [row for group in rows for row in group]
    values: dict[str, list[float]] = {}
    for row in flat:
        for name, value in row.parts.items():
            values.setdefault(name, []).append(value)
    greedy = [row.greedy_reward for row in flat if row.greedy_reward is not None]
    return RolloutStats(
        samples_per_prompt=len(rows[0]),
        rewards_N=torch.tensor([row.reward for row in flat], dtype=torch.float64),
        response_lengths_N=torch.tensor([row.response_length for row in flat]),
        prompt_lengths_N=torch.tensor([row.prompt_length for row in flat]),
        finished_N=torch.tensor([row.finished for row in flat]),
        failed_N=torch.tensor([row.failed for row in flat]),
        correct_N=torch.tensor([row.right for row in flat]),
        repetition_N=torch.tensor([row.repetition for row in flat], dtype=torch.float64),
        greedy_rewards_N=torch.tensor(greedy, dtype=torch.float64) if greedy else None,
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
    right: bool
    repetition: float
    greedy_reward: float | None


def _rows(group: Group) -> list[_Row]:
    length = len(group.prompt.token_ids)
    return [
        _Row(
            sample.reward, sample.reward_parts, sample.loss_tokens, length, sample.finished, sample.reward_failed,
            sample.correct, repetition(sample.token_ids), group.greedy_reward,
        )
        for sample in group.samples
    ]  # fmt: skip
