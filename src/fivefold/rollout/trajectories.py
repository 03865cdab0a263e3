"""Trajectories while they run: the sequences that the engine saw, and the time limit, which can be held."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.types import Completion, Prompt, Sample, Turn


@dataclass(frozen=True)
class Task:
    """One trajectory to sample."""

    prompt: Prompt
    place: int
    """Position of the prompt among those of the call, or of the run."""
    number: int
    """Number of the trajectory within its group."""
    draw: tuple[int, ...]
    """Parts of the key of its random draws: seed, step, prompt and number of the response."""
    seed: int
    """Seed of the environment, the same for all trajectories of a group."""

    @property
    def key(self) -> tuple[int, int]:
        """Key of the trajectory among those of its driver."""
        return self.place, self.number


class Clock:
    """A time limit that does not run while it is held."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._left = seconds
        self._since: float | None = None

    @property
    def left(self) -> float:
        """Seconds that are left of the limit, at least 0."""
        # Another thread may hold it meanwhile.
        since = self._since
        passed = 0.0 if since is None else time.monotonic() - since
        return max(0.0, self._left - passed)

    def run(self) -> None:
        """Let the time pass."""
        if self._since is None:
            self._since = time.monotonic()

    def hold(self) -> None:
        """Let no time pass until `run`."""
        self._left, self._since = self.left, None


@dataclass
class HeldSequence:
    """A context that the engine read, and what it sampled after it; tokens are appended and never changed."""

    context: list[int]
    cause: str | None = None
    """Why the sequence begins, a row of BREAKS; None for the first of a trajectory."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Weight version of each token."""
    routes_TLK: Any = None

    def __len__(self) -> int:
        return len(self.context) + len(self.token_ids)

    @property
    def tokens(self) -> list[int]:
        """All tokens that the next turn answers."""
        return self.context + self.token_ids

    def is_begun_by(self, context: Sequence[int]) -> bool:
        """Return whether a context begins with exactly the tokens held."""
        begin = len(self.context)
        return len(context) >= len(self) and context[:begin] == self.context and context[begin : len(self)] == self.token_ids

    @property
    def is_answered(self) -> bool:
        """Whether what follows the last turn is there; True before the first turn."""
        return not self.turns or self.turns[-1].end < len(self.token_ids)

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model reads."""
        self.token_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.loss_mask += [False] * len(tokens)
        self.versions += self.versions[-1:] * len(tokens)

    def add(self, turn: Turn, sampled: Completion) -> None:
        """Append a turn of the model."""
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.loss_mask += [True] * len(sampled.token_ids)
        self.versions += sampled.token_versions or [sampled.policy_version] * len(sampled.token_ids)
        self.routes_TLK = sampled.routes_TLK
        self.turns.append(turn)


@dataclass
class Trajectory:
    """State of a trajectory while it runs, and how it ended."""

    task: Task
    sequences: list[HeldSequence] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation so far: the first messages, then each turn with its answers."""
    turns: int = 0
    """Number of turns that were sampled."""
    end: str = "environment"
    error: str | None = None
    """Why it failed; None if it did not."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by the names that an agent gave them; their sum is the reward `environment`."""
    clock: Clock = field(default_factory=Clock)
    counts: Counter[str] = field(default_factory=Counter)
    """Events by the name of their metric."""
    state: str | None = None
    """State of the environment that the next turn answers."""
    place: Any = None
    """Where its environment is, while it runs."""
    restore: dict[str, Any] | None = None
    """State of its environment in a checkpoint, from which it continues."""

    @property
    def context(self) -> list[int]:
        """The first context; empty before there is one."""
        return self.sequences[0].context if self.sequences else []

    def extend_or_begin(self, context: list[int], cause: str | None = None) -> HeldSequence:
        """Return the sequence that the turn with this context belongs to.

        It is the longest one whose tokens the context begins with, which has then observed the rest; otherwise a new one,
        begun for this cause.
        """
        known = [held for held in self.sequences if held.is_begun_by(context)]
        if not known:
            self.sequences.append(HeldSequence(context, cause if self.sequences else None))
            return self.sequences[-1]
        longest = max(known, key=len)
        longest.observe(context[len(longest) :])
        return longest

    def sampled(self, held: HeldSequence, completion: Completion, text: str, state: str | None, seconds: float) -> None:
        """Append a turn of the model to one of the sequences."""
        begin = len(held.token_ids)
        end = begin + len(completion.token_ids)
        turn = Turn(self.turns, begin, end, 0.0, state, completion.finish_reason, seconds, text=text)
        held.add(turn, completion)
        self.turns += 1

    def earn(self, turn: Turn, reward: float) -> None:
        """Store what the environment gave for a turn."""
        for held in self.sequences:
            if held.turns and held.turns[-1].number == turn.number:
                held.turns[-1] = replace(held.turns[-1], given=reward)

    def in_order(self) -> list[tuple[Turn, list[int]]]:
        """Return the turns with their tokens, in the order of their numbers."""
        by_number = {
            turn.number: (turn, sequence.token_ids[turn.begin : turn.end])
            for sequence in self.sequences
            for turn in sequence.turns
        }
        return [by_number[number] for number in sorted(by_number)]

    def count(self, name: str, number: float = 1.0) -> None:
        """Add to the number of an event."""
        self.counts[name] += float(number)  # type: ignore[assignment]

    @property
    def older_tokens(self) -> int:
        """Number of sampled tokens from older weights than the last one of their sequence."""
        return sum(
            version < sequence.versions[-1]
            for sequence in self.sequences
            for version, is_own in zip(sequence.versions, sequence.loss_mask, strict=True)
            if is_own
        )

    def forget(self) -> None:
        """Begin again: nothing of it is kept."""
        self.sequences, self.messages, self.turns, self.state, self.restore = [], [], 0, None, None

    def samples(self) -> list[Sample]:
        """Return the sequences as samples that are not scored yet; `trajectory` is set if there are several."""
        held = [sequence for sequence in self.sequences if sequence.turns] or self.sequences[:1] or [HeldSequence([])]
        return self._samples(held)

    def _samples(self, held: Sequence[HeldSequence]) -> list[Sample]:
        number = self.task.number if len(held) > 1 else None
        return [
            Sample(
                token_ids=list(sequence.token_ids),
                # An engine that returned none for a turn has left out those of the step.
                logprobs=list(sequence.logprobs) if len(sequence.logprobs) == len(sequence.token_ids) else [],
                text="\n".join(turn.text or "" for turn in sequence.turns),
                end=self.end,
                policy_version=sequence.versions[0] if sequence.versions else 0,
                token_versions=list(sequence.versions) if len(set(sequence.versions)) > 1 else None,
                routes_TLK=sequence.routes_TLK,
                loss_mask=None if all(sequence.loss_mask) else list(sequence.loss_mask),
                reward_failed=self.error is not None,
                prompt_ids=sequence.context or None,
                trajectory=number,
                turns=tuple(sequence.turns),
                break_cause=sequence.cause,
                environment_rewards=self.rewards,
            )
            for sequence in held
        ]

    def part(self, restore: dict[str, Any] | None) -> Part:
        """Return a copy of what a checkpoint keeps; `restore`: state of the environment, if it has one."""
        record = {
            "turns": self.turns,
            "messages": list(self.messages),
            "state": self.state,
            "restore": restore,
            "seconds": None if math.isinf(self.clock.left) else self.clock.left,
            "counts": dict(self.counts),
        }
        return Part(*self.task.key, self._samples(self.sequences), record)

    @classmethod
    def of(cls, task: Task, part: Part, text: Callable[[list[int]], str]) -> Trajectory:
        """Return the trajectory that a checkpoint has kept; `text` decodes the tokens of a turn."""
        record = part.record
        assert record is not None
        clock = Clock(math.inf if record["seconds"] is None else record["seconds"])
        return cls(
            task,
            [_held(sample, text) for sample in part.samples],
            record["messages"],
            record["turns"],
            clock=clock,
            counts=Counter(record["counts"]),
            state=record["state"],
            restore=record["restore"],
        )


@dataclass(frozen=True)
class Part:
    """A trajectory of a group that is not complete, as a checkpoint keeps it."""

    place: int
    number: int
    samples: list[Sample]
    record: dict[str, Any] | None = None
    """What an unfinished trajectory needs to continue, as JSON has it; None if it has ended."""


def _held(sample: Sample, text: Callable[[list[int]], str]) -> HeldSequence:
    count = len(sample.token_ids)
    return HeldSequence(
        sample.prompt_ids or [],
        sample.break_cause,
        sample.token_ids,
        sample.logprobs,
        sample.loss_mask or [True] * count,
        [replace(turn, text=text(sample.token_ids[turn.begin : turn.end])) for turn in sample.turns],
        sample.token_versions or [sample.policy_version] * count,
        sample.routes_TLK,
    )
