"""A rank's groups that wait for the step that takes them: their requests in flight, samples and scoring."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from fivefold.interfaces import Stream
from fivefold.reward.pool import Scoring
from fivefold.rollout.generation import Generator
from fivefold.types import Completion, Prompt, Request, Sample, Sampling


@dataclass
class OpenGroup:
    """A group that was given out and is not used yet."""

    prompt: Prompt
    requests: dict[int, Request] = field(default_factory=dict)
    """Requests in flight, by id."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Id of a request in flight -> its number in the group."""
    samples: dict[int, Sample] = field(default_factory=dict)
    scoring: list[Scoring] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        return not self.requests

    @property
    def is_complete(self) -> bool:
        return self.is_sampled and all(each.done() for each in self.scoring)

    def in_order(self) -> list[Sample]:
        """Return the samples in the order of their requests."""
        return [self.samples[number] for number in sorted(self.samples)]


@dataclass
class Tokens:
    """Counts of tokens on this rank that were sampled while weights changed."""

    aborted: int = 0
    """Tokens thrown away."""
    reused: int = 0
    """Tokens from older weights than the last token of their response."""


class OpenGroups:
    """This rank's open groups by their place in the run; those of a replica are complete on its leading rank only."""

    def __init__(self, generator: Generator) -> None:
        self._generator, self._leads = generator, generator.engine.replica.leads
        self.stream: Stream = generator.engine.stream()
        self._ids = count()
        self._groups: dict[int, OpenGroup] = {}
        self._owner: dict[int, int] = {}
        """Id of a request in flight -> place of its group in the run."""
        self._tokens = Tokens()

    def __contains__(self, place: int) -> bool:
        return place in self._groups

    def ask(self, place: int, prompt: Prompt, sampling: Sampling, seeds: Sequence[int]) -> None:
        """Request a response to the prompt with each of these seeds."""
        group = self._groups[place] = OpenGroup(prompt)
        for number, seed in enumerate(seeds):
            request = Request(next(self._ids), prompt.token_ids, sampling, seed)
            group.requests[request.id], group.numbers[request.id] = request, number
            self._owner[request.id] = place
        self.stream.submit(list(group.requests.values()))

    def collect(self, seconds: float) -> None:
        """Store what is sampled within about this many seconds, and begin to score it."""
        for completion in self.stream.arrived(seconds):
            self._keep(completion)

    def _keep(self, completion: Completion) -> None:
        group = self._groups[self._owner[completion.request_id]]
        if completion.finish_reason == "abort":
            # Aborted by a weight update: sample it again with the new weights.
            self._tokens.aborted += len(completion.token_ids)
            self.stream.submit([group.requests[completion.request_id]])
            return
        del self._owner[completion.request_id], group.requests[completion.request_id]
        number = group.numbers.pop(completion.request_id)
        versions = completion.token_versions or []
        self._tokens.reused += sum(version < versions[-1] for version in versions)
        sample = group.samples[number] = self._generator.to_sample(completion)
        if self._leads:
            group.scoring.append(self._generator.rewards.submit(group.prompt, [sample]))

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
            self.stream.drop(group.requests)
            for request_id in group.requests:
                del self._owner[request_id]
            self._tokens.aborted += sum(len(sample.token_ids) for sample in group.samples.values())

    def take_tokens(self) -> Tokens:
        """Return the counts since the previous call."""
        tokens, self._tokens = self._tokens, Tokens()
        return tokens

    def copies(self) -> tuple[dict[int, list[Sample]], set[int]]:
        """Return copies of the samples of sampled groups by place, and the places of those that are also scored."""
        # A reward model changes the reward when a step takes the group.
        held = {
            place: [copy.copy(sample) for sample in group.in_order()]
            for place, group in self._groups.items()
            if self._leads and group.is_sampled
        }
        return held, {place for place, _ in self.complete()}

    def restore(self, place: int, prompt: Prompt, samples: Sequence[Sample], is_scored: bool) -> None:
        """Add a group that was sampled by an earlier process, and begin to score it unless it is."""
        group = self._groups[place] = OpenGroup(prompt, samples=dict(enumerate(samples)))
        if not is_scored and self._leads:
            group.scoring = [self._generator.rewards.submit(prompt, [sample]) for sample in samples]
