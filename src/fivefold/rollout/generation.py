"""Prompts -> groups: sends requests to an engine and scores completions as they arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from fivefold.engines.sampling import request_seed
from fivefold.interfaces import Engine, EngineState, SteppedEngine
from fivefold.observability.run_logger import RunLogger
from fivefold.reward.manager import RewardManager
from fivefold.reward.pool import Scoring
from fivefold.rollout.conversations import Conversations, conversation_metrics
from fivefold.rollout.driver import Usage
from fivefold.rollout.trajectories import Trajectory
from fivefold.types import Completion, Group, Prompt, Request, Sample, Sampling, by_trajectory

_ROUND_SECONDS = 0.5
"""Seconds between two exchanges of the ranks while trajectories run."""


class Decoder(Protocol):
    """The part of a tokenizer that converts tokens to text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Generator:
    """Samples responses to prompts and scores them."""

    engine: Engine
    tokenizer: Decoder
    rewards: RewardManager
    logger: RunLogger
    refresh: Callable[[], None] | None = None
    """Sends weights to an engine again after it lost them together with its servers. Collective."""
    conversations: Conversations | None = None
    """Samples trajectories of several turns; None: one response to each prompt."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        draw: tuple[int, ...],
        is_scored: bool = True,
        counts: Counter[str] | None = None,
    ) -> list[Group]:
        """Sample and score this rank's groups of `group_size` responses, indexed by the position of their prompt.
        Collective.

        Every rank passes all prompts. Unless `is_scored`, all rewards are 0. `draw` (seed, step, ...) fixes the random
        numbers, together with the prompt's id and the number of the response. Repeats of a prompt get new response numbers.
        `counts`: gets the events of trajectories, for `record_counts`.
        """
        if self.conversations is not None and is_scored:
            return self._converse(
                self.conversations, prompts, group_size, sampling, draw, Counter() if counts is None else counts
            )
        replica, ranks = self.engine.replica, self.rewards.ranks
        heartbeat = ranks.heartbeat
        heartbeat.begin()
        places = [place for place in range(len(prompts)) if replica.owns(place)]
        numbers = first_numbers(prompts, group_size)
        requests = [
            Request(
                place * group_size + number,
                prompts[place].token_ids,
                sampling,
                request_seed((*draw, prompts[place].id, numbers[place] + number)),
            )
            for place in places
            for number in range(group_size)
        ]
        samples: dict[int, Sample] = {}
        scoring: list[Scoring] = []
        # A stepped engine checks for the end of the run before each step that its ranks take together. With others a rank
        # samples alone, and checks after each response.
        finished, is_ending = count(), isinstance(self.engine, SteppedEngine)
        while True:
            for completion in self.engine.generate([request for request in requests if request.id not in samples]):
                if completion.finish_reason == "lost":
                    continue
                if not is_ending and not heartbeat.item(next(finished), [ranks.rank]):
                    is_ending = heartbeat.check()
                    self.engine.abort()
                if replica.leads:
                    sample = self.to_sample(completion)
                    samples[completion.request_id] = sample
                    if is_scored:
                        scoring.append(self.rewards.submit(prompts[completion.request_id // group_size], [sample]))
                    else:
                        sample.reward = 0.0
                self.logger.advance(len(samples), len(requests))
            if self.engine.state is not EngineState.LOST:
                break
            assert self.refresh is not None
            self.refresh()
        groups = [
            Group(prompts[place], [samples[place * group_size + number] for number in range(group_size)], index=place)
            for place in (places if replica.leads else ())
        ]
        if is_scored:
            with self.logger.stage("reward"):
                self.rewards.finish(groups, scoring)
        return groups

    def _converse(
        self,
        conversations: Conversations,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        draw: tuple[int, ...],
        counts: Counter[str],
    ) -> list[Group]:
        """Sample and score groups of trajectories. Collective."""
        ranks, numbers = self.rewards.ranks, first_numbers(prompts, group_size)
        places = [place for place in range(len(prompts)) if self.engine.replica.owns(place)]
        driver = conversations.driver(self.engine)
        tasks = (conversations.tasks(prompts[place], place, numbers[place], group_size, draw) for place in places)
        driver.add([task for group in tasks for task in group], sampling)
        usage = Usage(driver)
        samples: dict[tuple[int, int], list[Sample]] = {}
        scoring: list[Scoring] = []
        while ranks.any(driver.is_running):
            for held in driver.advance(_ROUND_SECONDS):
                self.logger.note_response()
                sequences = samples[held.task.key] = held.samples()
                counts.update(held.counts)
                scoring.append(self.score(held, sequences))
                self.logger.advance(len(samples), len(places) * group_size)
            self.engine.look_after()
            if self.engine.state is EngineState.LOST:
                assert self.refresh is not None
                self.refresh()
        usage.count(counts)
        groups = [
            group_of(prompts[place], [samples[place, number] for number in range(group_size)], place) for place in places
        ]
        with self.logger.stage("reward"):
            self.rewards.finish(groups, scoring)
        return groups

    def score(self, held: Trajectory, sequences: Sequence[Sample]) -> Scoring:
        """Begin to score a trajectory that has ended; a failed one has no reward."""
        if held.error is None:
            return self.rewards.submit(held.task.prompt, sequences)
        outcome: Scoring = Future()
        outcome.set_result(held.error)
        return outcome

    def record_counts(self, counts: Mapping[str, float]) -> None:
        """Record the metrics of environments and tools from the events of trajectories. Collective."""
        if self.conversations is not None:
            self.logger.record(conversation_metrics(counts, self.rewards.ranks))

    def to_sample(self, completion: Completion) -> Sample:
        """Convert a completion to a sample that is not scored yet."""
        self.logger.note_response()
        return Sample(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            text=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            end="answered" if completion.finish_reason == "stop" else completion.finish_reason,
            policy_version=completion.policy_version,
            token_versions=completion.token_versions,
            routes_TLK=completion.routes_TLK,
        )


def group_of(prompt: Prompt, trajectories: Sequence[Sequence[Sample]], index: int = 0) -> Group:
    """Return the group of these trajectories in their order, each with its sequences."""
    samples = numbered(trajectories)
    return Group(with_context(prompt, samples), samples, index=index)


def numbered(trajectories: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the sequences of these trajectories, with the number of their trajectory if one has several."""
    if any(len(sequences) > 1 for sequences in trajectories):
        for number, sequences in enumerate(trajectories):
            for sample in sequences:
                sample.trajectory = number
    return [sample for sequences in trajectories for sample in sequences]


def with_context(prompt: Prompt, samples: Sequence[Sample]) -> Prompt:
    """Return the prompt with the context with which all trajectories begin; samples with this context then take it from the
    prompt."""
    contexts = [sequences[0].prompt_ids for sequences in by_trajectory(samples) if sequences[0].prompt_ids is not None]
    if not contexts or any(context != contexts[0] for context in contexts):
        return prompt
    for sample in samples:
        if sample.prompt_ids == contexts[0]:
            sample.prompt_ids = None
    return replace(prompt, token_ids=contexts[0])


def first_numbers(prompts: Sequence[Prompt], group_size: int) -> list[int]:
    """Return, for each position, the number of its first response among all responses to the same prompt."""
    seen: Counter[int] = Counter()
    numbers = []
    for prompt in prompts:
        numbers.append(seen[prompt.id] * group_size)
        seen[prompt.id] += 1
    return numbers
