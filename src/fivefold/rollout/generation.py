"""Prompts -> groups: requests of an engine, whose completions are scored as they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from fivefold.engines.sampling import request_seed
from fivefold.interfaces import Engine, SteppedEngine
from fivefold.observability.run_logger import RunLogger
from fivefold.reward.manager import RewardManager
from fivefold.reward.pool import Scoring
from fivefold.types import Completion, Group, Prompt, Request, Sample, Sampling


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Generator:
    """Samples responses to prompts and scores them."""

    engine: Engine
    tokenizer: Decoder
    rewards: RewardManager
    logger: RunLogger
    refresh: Callable[[], None] | None = None
    """Gives an engine new weights that can lose them, with its servers. Collective."""
    members: Sequence[int] | None = None
    """Ranks of this rank's replica of the engine, which take every step of it together; all where they are not known."""

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draw: tuple[int, ...], is_scored: bool = True
    ) -> list[Group]:
        """This rank's groups of `group_size` responses with rewards, by the place of their prompt; every rank names all
        prompts. Unless `is_scored` all rewards are 0.

        `draw` (seed, step, ...) with a prompt's id and the number of the response fixes what is drawn; a prompt that comes
        twice has further numbers the second time. Collective.
        """
        replica, heartbeat = self.engine.replica, self.rewards.ranks.heartbeat
        heartbeat.begin()
        own = [place for place in range(len(prompts)) if replica.owns(place)]
        numbers = first_numbers(prompts, group_size)
        requests = [
            Request(
                place * group_size + number,
                prompts[place].token_ids,
                sampling,
                request_seed((*draw, prompts[place].id, numbers[place] + number)),
            )
            for place in own
            for number in range(group_size)
        ]
        found: dict[int, Sample] = {}
        scoring: list[Scoring] = []
        # An engine that asks before its own steps ends by itself.
        finished, is_ending = count(), isinstance(self.engine, SteppedEngine)
        while True:
            for completion in self.engine.generate([request for request in requests if request.id not in found]):
                if not is_ending and not heartbeat.item(next(finished), self.members):
                    is_ending = heartbeat.check()
                    self.engine.abort()
                if replica.leads:
                    sample = self.to_sample(completion)
                    found[completion.request_id] = sample
                    if is_scored:
                        scoring.append(self.rewards.submit(prompts[completion.request_id // group_size], sample))
                    else:
                        sample.reward = 0.0
                self.logger.advance(len(found), len(requests))
            if self.engine.version >= 0 or self.refresh is None:
                break
            self.refresh()
        groups = [
            Group(prompts[place], [found[place * group_size + number] for number in range(group_size)], index=place)
            for place in (own if replica.leads else ())
        ]
        if is_scored:
            with self.logger.stage("reward"):
                self.rewards.finish(groups, scoring)
        return groups

    def to_sample(self, completion: Completion) -> Sample:
        """What was sampled, not scored yet."""
        return Sample(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            text=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            finished=completion.finish_reason == "stop",
            policy_version=completion.policy_version,
            token_versions=completion.token_versions,
            routes_TLK=completion.routes_TLK,
        )


def first_numbers(prompts: Sequence[Prompt], group_size: int) -> list[int]:
    """For each place the number of its first response among all of the same prompt."""
    seen: Counter[int] = Counter()
    numbers = []
    for prompt in prompts:
        numbers.append(seen[prompt.id] * group_size)
        seen[prompt.id] += 1
    return numbers
