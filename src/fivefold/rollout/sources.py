"""Sources of a step's groups: an engine, the responses of a dataset, or dynamic sampling around another source.

Each one is a RolloutSource: `next(step)` returns this rank's groups, each with its index among the groups of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fivefold.data.prompt_loader import Loader
from fivefold.distributed.ranks import Ranks
from fivefold.errors import UserError
from fivefold.interfaces import RolloutSource
from fivefold.observability.run_logger import RunLogger
from fivefold.rollout.generation import Generator
from fivefold.rollout.logprob_steps import LogprobSteps
from fivefold.rollout.stats import Informative
from fivefold.types import DatasetResponse, Group, Prompt, Sample, Sampling


class PromptQueue:
    """The prompts of a run in order, with the position up to which they were taken."""

    def __init__(self, loader: Loader[Prompt], log: RunLogger, metric: str = "epoch", end: int | None = None) -> None:
        """`end`: number of prompts that the run may take; None: no limit."""
        self._loader, self._log, self._metric, self._end = loader, log, metric, end
        self.position = 0

    def has(self, count: int) -> bool:
        """Return whether `count` prompts are left."""
        return self._end is None or self.position + count <= self._end

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, and record the epoch of the first one."""
        self._log.record({self._metric: float(self._loader.epoch(self.position))})
        self.position += count
        return self._loader.take(self.position - count, count)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position; raises ValueError if the saved run gave out prompts ahead that it did not use."""
        if unused := state.get("unused"):
            raise UserError(
                f"{len(unused)} prompts were given out and not used, and a synchronous run would leave them out: "
                "set rollout.max_staleness: 0, which draws what a synchronous run does"
            )
        self.position = int(state["position"])


class EngineRollouts(RolloutSource):
    """Samples responses with an engine and scores them."""

    def __init__(
        self,
        generator: Generator,
        prompts: PromptQueue,
        log: RunLogger,
        sampling: Sampling,
        *,
        seed: int,
        group_size: int,
        prompts_per_call: int,
        with_greedy: bool = False,
        logprobs: LogprobSteps | None = None,
    ) -> None:
        """`with_greedy`: the method compares with the reward of the most likely response. `logprobs`: steps in which the
        engine returns log-probs; None: every step."""
        self._generator, self._prompts, self._log = generator, prompts, log
        self._sampling, self._seed, self._group_size, self._count = sampling, seed, group_size, prompts_per_call
        self._with_greedy, self._logprobs = with_greedy, logprobs
        self._step, self._round = -1, 0
        self._counts: Counter[str] = Counter()
        """Events of the step's trajectories."""

    def next(self, step: int) -> list[Group] | None:
        """Return this rank's groups of the next prompts; a further call in the same step takes further prompts."""
        if not self._prompts.has(self._count):
            return None
        if step != self._step:
            self._round, self._counts = -1, Counter()
        self._round, self._step = self._round + 1, step
        prompts = self._prompts.take(self._count)
        # The round is part of the draw: a prompt repeated in a later round of the step gets other responses.
        draw = (self._seed, step + (self._round << 32))
        sampling = self._sampling if self._logprobs is None else self._logprobs.of(self._sampling, step)
        groups = self._generator.sample(prompts, self._group_size, sampling, draw, counts=self._counts)
        self._generator.record_counts(self._counts)
        if self._with_greedy:
            with self._log.stage("greedy"):
                greedy = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
                most_likely = self._generator.sample(prompts, 1, greedy, draw)
            for group, other in zip(groups, most_likely, strict=True):
                group.greedy_reward = other.samples[0].reward
                group.greedy_length = sum(sample.loss_tokens for sample in other.samples)
                if other.samples[0].reward_failed:
                    # The group has no baseline without the greedy reward.
                    for sample in group.samples:
                        sample.reward_failed = True
        return groups

    def state_dict(self) -> dict[str, Any]:
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)


class DatasetRollouts(RolloutSource):
    """Responses from the dataset: the one to imitate, or the chosen and the rejected one."""

    def __init__(self, prompts: PromptQueue, ranks: Ranks, prompts_per_step: int) -> None:
        self._prompts, self._ranks, self._count = prompts, ranks, prompts_per_step

    def next(self, step: int) -> list[Group]:
        """Return this rank's groups of the next prompts."""
        return self._ranks.shard(groups_from_dataset(self._prompts.take(self._count)))

    def state_dict(self) -> dict[str, Any]:
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)


class ExpertRollouts(RolloutSource):
    """Adds expert responses from the dataset to the groups of another source, equally many in each optimizer step."""

    def __init__(
        self, source: RolloutSource, experts: PromptQueue, ranks: Ranks, *, groups: int, per_step: int, updates: int
    ) -> None:
        """`groups`: groups of the other source used per step; the step's optimizer steps take whole groups in order."""
        self._source, self._experts, self._ranks = source, experts, ranks
        self._groups, self._count, self._updates = groups, per_step, updates

    def next(self, step: int) -> list[Group] | None:
        """Return this rank's groups: in each optimizer step the source's groups first, then the expert's."""
        if (groups := self._source.next(step)) is None:
            return None
        groups_of_update, more = self._groups // self._updates, self._count // self._updates
        sampled = [
            replace(group, index=group.index + more * min(group.index // groups_of_update, self._updates))
            for group in groups
        ]
        experts = [
            replace(group, index=groups_of_update * (group.index // more + 1) + group.index, is_expert=True)
            for group in groups_from_dataset(self._experts.take(self._count))
        ]
        return sampled + self._ranks.shard(experts)

    def state_dict(self) -> dict[str, Any]:
        return {**self._source.state_dict(), "expert": self._experts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)
        self._experts.load_state_dict(state["expert"])


class DynamicSampling(RolloutSource):
    """Replaces groups without reward variance (DAPO, 2503.14476, section 3.2) or with a mean reward out of bounds (PRIME,
    2502.01456).

    It draws from another source within a step until enough groups are informative. After the last round, groups that are not
    informative fill up the step. Unused groups come last; the metrics cover all sampled groups.
    """

    def __init__(
        self,
        source: RolloutSource,
        ranks: Ranks,
        log: RunLogger,
        *,
        groups_per_step: int,
        max_rounds: int,
        informative: Informative | None = None,
    ) -> None:
        """`informative` returns whether the step should use a group with these samples."""
        self._source, self._ranks, self._log = source, ranks, log
        self._needed, self._max_rounds, self._informative = groups_per_step, max_rounds, informative or Informative()

    def next(self, step: int) -> list[Group] | None:
        """Return this rank's groups of all rounds, the chosen ones first."""
        groups_by_place: dict[int, Group] = {}
        informative: list[int] = []
        zero_variance: list[int] = []
        rounds = begin = 0
        while len(informative) < self._needed and rounds < self._max_rounds:
            if (groups := self._source.next(step)) is None:
                return None
            mine = [[begin + group.index, self._informative(group.samples)] for group in groups]
            groups_by_place |= {begin + group.index: group for group in groups}
            gathered = torch.cat(self._ranks.all_gather_world(torch.tensor(mine, dtype=torch.long).view(-1, 2)))
            for index, is_informative in sorted(gathered.tolist()):
                (informative if is_informative else zero_variance).append(index)
            begin += len(gathered)
            rounds += 1
        self._report(rounds, len(informative), len(zero_variance))
        ordered = enumerate(informative + zero_variance)
        return [
            replace(groups_by_place[index], index=place, is_used=place < self._needed)
            for place, index in ordered
            if index in groups_by_place
        ]

    def _report(self, rounds: int, informative: int, zero_variance: int) -> None:
        total = informative + zero_variance
        missing = max(0, self._needed - informative)
        self._log.record(
            {
                "dynamic_sampling/rounds": float(rounds),
                "dynamic_sampling/prompts": float(total),
                "dynamic_sampling/kept_fraction": informative / total,
                "dynamic_sampling/zero_variance_used": float(missing),
            }
        )
        if missing:
            self._log.log(
                f"after {rounds} rounds {informative / total:.0%} of {total} prompts had responses of different rewards: "
                f"{missing} groups without reward variance fill up the step"
            )

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)


def groups_from_dataset(prompts: Sequence[Prompt]) -> list[Group]:
    """Return the dataset's responses as groups. Of two responses, the first is the chosen one, with reward 1."""
    return [
        Group(
            prompt,
            [
                Sample(response.token_ids, [], response.text, _end(response), 0, loss_mask=response.loss_mask, reward=reward)
                for response, reward in zip(prompt.responses, (1.0, 0.0), strict=False)
            ],
            index=index,
        )
        for index, prompt in enumerate(prompts)
    ]


def _end(response: DatasetResponse) -> str:
    return "length" if response.truncated else "answered"
