"""A rank's groups that wait for the step that takes them: what is sampled for them, and its scoring."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from fivefold.engines.sampling import request_seed
from fivefold.interfaces import EngineState, Load, Stream
from fivefold.reward.pool import Scoring
from fivefold.rollout.conversations import Conversations
from fivefold.rollout.driver import Usage
from fivefold.rollout.generation import Generator, group_of, numbered
from fivefold.rollout.group_files import digest_of
from fivefold.rollout.trajectories import Part, Task, Trajectory
from fivefold.types import ENDS, Completion, Group, Prompt, Request, Sample, Sampling, by_trajectory

Copies: TypeAlias = tuple[
    dict[int, list[Sample]], set[int], list[Part], Mapping[int, Mapping[str, float]], Mapping[int, str]
]

_ROUND_SECONDS = 0.5
"""Seconds between two checks whether the run is to end, while an engine in the ranks samples trajectories."""


@dataclass(frozen=True)
class Wanted:
    """A group to sample."""

    place: int
    """Place of its prompt in the run."""
    prompt: Prompt
    size: int
    first: int
    """Number of the first response among all responses to the same prompt in its step."""
    draw: tuple[int, int]
    """Seed and step of its random draws."""
    sampling: Sampling


@dataclass
class OpenGroup:
    """A group that was given out and is not used yet."""

    prompt: Prompt
    missing: set[int]
    """Numbers of the trajectories that are not sampled yet."""
    sequences: dict[int, list[Sample]] = field(default_factory=dict)
    """Sequences of each trajectory that is sampled."""
    scoring: list[Scoring] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Events of its trajectories that have ended, for the metrics of the step that takes it."""

    @property
    def is_sampled(self) -> bool:
        return not self.missing

    @property
    def is_complete(self) -> bool:
        return self.is_sampled and all(future.done() for future in self.scoring)

    @property
    def samples(self) -> list[Sample]:
        """The samples so far, in the order of their trajectories."""
        return numbered([self.sequences[number] for number in sorted(self.sequences)])

    def in_order(self, index: int) -> Group:
        """Return the whole group, whose samples then share the context that they have in common."""
        return group_of(self.prompt, [self.sequences[number] for number in sorted(self.sequences)], index)


@dataclass
class Tokens:
    """Counts of tokens on this rank that were sampled while weights changed."""

    aborted: int = 0
    """Tokens thrown away."""
    reused: int = 0
    """Tokens from older weights than the last token of their response."""


class OpenGroups(ABC):
    """This rank's open groups by their place in the run; those of a replica are complete on its leading rank only."""

    def __init__(self, generator: Generator) -> None:
        self._generator, self._leads = generator, generator.engine.replica.leads
        self._groups: dict[int, OpenGroup] = {}
        self._tokens = Tokens()

    def __contains__(self, place: int) -> bool:
        return place in self._groups

    @abstractmethod
    def ask(self, wanted: Wanted) -> None:
        """Begin to sample a group, or what is missing of it."""

    @abstractmethod
    def collect(self, seconds: float) -> None:
        """Store what is sampled within about this many seconds, and begin to score it."""

    @abstractmethod
    def load(self) -> Load | None:
        """Return the engine's load with this rank's requests since the previous call; None if it samples in the ranks."""

    @abstractmethod
    def _drop(self, place: int, missing: set[int]) -> None:
        """Give up what is sampled of a group."""

    def record(self) -> None:  # noqa: B027 - responses of one turn have none
        """Record the metrics of environments and tools since the previous call. Collective."""

    def complete(self) -> Iterator[tuple[int, OpenGroup]]:
        """Yield place and group of those that are sampled and scored; none on a rank that does not lead its replica."""
        if self._leads:
            yield from ((place, group) for place, group in self._groups.items() if group.is_complete)

    def take(self, place: int) -> OpenGroup | None:
        """Remove a group and return it; None if another rank has its samples."""
        group = self._groups.pop(place, None)
        return group if self._leads else None

    def discard(self, place: int) -> None:
        """Remove a group, if it is this rank's, with everything sampled for it."""
        if (group := self._groups.pop(place, None)) is not None:
            self._drop(place, group.missing)
            self._tokens.aborted += sum(sample.loss_tokens for sample in group.samples)

    def take_tokens(self) -> Tokens:
        """Return the counts since the previous call."""
        tokens, self._tokens = self._tokens, Tokens()
        return tokens

    def copies(self) -> Copies:
        """Return copies of the samples of sampled groups by place, the places of those that are also scored, the
        trajectories of other groups that a checkpoint keeps, and events and digest of the prompt of groups by place."""
        # A reward model changes the reward when a step takes the group.
        held = {
            place: [copy.copy(sample) for sample in group.samples]
            for place, group in self._groups.items()
            if self._leads and group.is_sampled
        }
        counts = {place: group.counts.copy() for place, group in self._groups.items() if group.counts}
        prompts = {place: digest_of(group.prompt) for place, group in self._groups.items()}
        return held, {place for place, _ in self.complete()}, self._parts(), counts, prompts

    def _parts(self) -> list[Part]:
        return []

    def restore(self, wanted: Wanted, samples: Sequence[Sample], counts: Mapping[str, float], is_scored: bool) -> None:
        """Add a group that was sampled by an earlier process, and begin to score it unless it is."""
        group = self._groups[wanted.place] = OpenGroup(wanted.prompt, set(), counts=Counter(counts))
        for number, sequences in enumerate(by_trajectory(samples)):
            self._add(group, number, sequences, is_scored)

    def resume(self, wanted: Wanted, parts: Sequence[Part], counts: Mapping[str, float]) -> None:
        """Add a group of which an earlier process has sampled parts, and continue to sample it."""
        raise AssertionError("responses of one turn have no parts")

    def _add(self, group: OpenGroup, number: int, sequences: list[Sample], is_scored: bool = False) -> None:
        """Store the sequences of a trajectory that has ended, and begin to score it."""
        group.sequences[number] = sequences
        group.missing.discard(number)
        if self._leads and not is_scored:
            group.scoring.append(self._scored(group.prompt, sequences))

    def _scored(self, prompt: Prompt, sequences: list[Sample]) -> Scoring:
        if ENDS[sequences[0].end] != "failed":
            return self._generator.rewards.submit(prompt, sequences)
        outcome: Scoring = Future()
        outcome.set_result(f"a trajectory has ended with {sequences[0].end!r} before the run was resumed")
        return outcome


class OpenResponses(OpenGroups):
    """Open groups of responses of one turn each."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(generator)
        self._stream: Stream = generator.engine.stream()
        self._ids = count()
        self._requests: dict[int, tuple[int, int, Request]] = {}
        """Id of a request in flight -> place and number of its response, and the request."""

    def ask(self, wanted: Wanted) -> None:
        self._groups[wanted.place] = OpenGroup(wanted.prompt, set(range(wanted.size)))
        requests = []
        for number in range(wanted.size):
            seed = request_seed((*wanted.draw, wanted.prompt.id, wanted.first + number))
            request = Request(next(self._ids), wanted.prompt.token_ids, wanted.sampling, seed)
            self._requests[request.id] = wanted.place, number, request
            requests.append(request)
        self._stream.submit(requests)

    def collect(self, seconds: float) -> None:
        for completion in self._stream.arrived(seconds):
            self._keep(completion)

    def _keep(self, completion: Completion) -> None:
        place, number, request = self._requests[completion.request_id]
        if completion.finish_reason == "abort":
            # Aborted by a weight update: sample it again with the new weights.
            self._tokens.aborted += len(completion.token_ids)
            self._stream.submit([request])
            return
        del self._requests[completion.request_id]
        versions = completion.token_versions or []
        self._tokens.reused += sum(version < versions[-1] for version in versions)
        self._add(self._groups[place], number, [self._generator.to_sample(completion)])

    def load(self) -> Load | None:
        return self._stream.load()

    def _drop(self, place: int, missing: set[int]) -> None:
        gone = [number for number, (of, _, _) in self._requests.items() if of == place]
        self._stream.drop(gone)
        for number in gone:
            del self._requests[number]


class OpenTrajectories(OpenGroups):
    """Open groups of trajectories, which continue in the background where the engine samples there."""

    def __init__(self, generator: Generator, conversations: Conversations) -> None:
        super().__init__(generator)
        self._conversations, self._driver = conversations, conversations.driver(generator.engine)
        self._driver.start()
        self._counts: Counter[str] = Counter()
        self._usage = Usage(self._driver)
        self._load: Load | None = None

    def ask(self, wanted: Wanted) -> None:
        self._groups[wanted.place] = OpenGroup(wanted.prompt, set(range(wanted.size)))
        self._driver.add(self._tasks(wanted), wanted.sampling)

    def collect(self, seconds: float) -> None:
        self._store(self._driver.advance(seconds))
        heartbeat, engine = self._generator.rewards.ranks.heartbeat, self._generator.engine
        # Sampling and training take turns: all trajectories end before new weights, as responses of one turn do.
        while self._driver.blocks and self._driver.is_running and engine.state is EngineState.READY:
            self._store(self._driver.advance(_ROUND_SECONDS))
            if heartbeat.check():
                break

    def _store(self, ended: Sequence[Trajectory]) -> None:
        for held in ended:
            sequences, counts = held.samples(), held.counts
            self._tokens.aborted += int(counts["turns/aborted_tokens"])
            self._tokens.reused += held.older_tokens
            group = self._groups[held.task.place]
            group.counts.update(counts)
            group.sequences[held.task.number] = sequences
            group.missing.discard(held.task.number)
            group.scoring.append(self._generator.score(held, sequences))

    def take(self, place: int) -> OpenGroup | None:
        if self._leads and place in self._groups:
            self._counts.update(self._groups[place].counts)
        return super().take(place)

    def load(self) -> Load | None:
        self._load = self._driver.load()
        return self._load

    def record(self) -> None:
        self._usage.count(self._counts, self._load)
        self._generator.record_counts(self._counts)
        self._counts = Counter()

    def copies(self) -> Copies:
        self.collect(0.0)
        return super().copies()

    def _tasks(self, wanted: Wanted) -> list[Task]:
        return self._conversations.tasks(wanted.prompt, wanted.place, wanted.first, wanted.size, wanted.draw)

    def _drop(self, place: int, missing: set[int]) -> None:
        for held in self._driver.discard([(place, number) for number in missing]):
            self._tokens.aborted += sum(sample.loss_tokens for sample in held.samples())

    def _parts(self) -> list[Part]:
        ended = [
            Part(place, number, [copy.copy(sample) for sample in sequences])
            for place, group in self._groups.items()
            if not group.is_sampled
            for number, sequences in group.sequences.items()
        ]
        return ended + self._driver.parts()

    def resume(self, wanted: Wanted, parts: Sequence[Part], counts: Mapping[str, float]) -> None:
        group = OpenGroup(wanted.prompt, set(range(wanted.size)), counts=Counter(counts))
        self._groups[wanted.place] = group
        tasks, held = {task.number: task for task in self._tasks(wanted)}, []
        for part in parts:
            if part.record is None:
                self._add(group, part.number, part.samples)
                del tasks[part.number]
            else:
                held.append(Trajectory.of(tasks.pop(part.number), part, self._conversations.dialog.text))
        self._driver.resume(held, wanted.sampling)
        self._driver.add(list(tasks.values()), wanted.sampling)


def open_groups(generator: Generator) -> OpenGroups:
    """Return the open groups of this rank."""
    if generator.conversations is None:
        return OpenResponses(generator)
    return OpenTrajectories(generator, generator.conversations)
