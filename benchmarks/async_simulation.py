"""What sampling ahead gains where responses have a long tail: simulated, with the rule of admission that runs have.

python benchmarks/async_simulation.py [LENGTHS.jsonl ...]      # no GPU, no torch; a minute

An engine replica samples a token of each of c sequences in `A + B c` seconds (fitted to vLLM 0.26 on an H200, 1.7B: 37,800
tokens/s with 256 sequences, 3 ms with one); a GPU trains on 22,000 tokens/s (1.7B at 336 TFLOP/s, with the forward passes of
policy and reference). Four GPUs: all sample and then all train in turns, or two sample and two train at once. Files are rows
with the column `length`: a distribution that was recorded; a log-normal one stands here.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fivefold.rollout.staleness import Admission

PROMPTS, GROUP, STEPS, WARM = 128, 8, 24, 6
LONGEST, MOST_SEQUENCES = 8192, 256
A, B = 3.0e-3, 1.48e-5
TRAINED_TOKENS = 22_000.0
SYNC, PAUSE = 0.5, 0.3
"""Seconds of a weight sync in turns, and in which servers pause for one over the wire."""


@dataclass
class Replica:
    """Sequences that are decoded together: each gets a token in every pass."""

    done: list[tuple[float, int, int]] = field(default_factory=list)
    """(passes at which it ends, request, passes at which it began)."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(request, length), taken from the end."""
    passes: float = 0.0
    busy: float = 0.0

    def fill(self) -> None:
        while self.waiting and len(self.done) < MOST_SEQUENCES:
            request, length = self.waiting.pop()
            heapq.heappush(self.done, (self.passes + length, request, int(self.passes)))

    @property
    def pass_seconds(self) -> float:
        return A + B * len(self.done)

    def next_end(self) -> float:
        """Seconds until a sequence ends."""
        return (self.done[0][0] - self.passes) * self.pass_seconds if self.done else math.inf

    def advance(self, seconds: float) -> list[int]:
        """Requests that end meanwhile, none of which ends before."""
        if not self.done:
            return []
        self.busy += seconds
        self.passes += seconds / self.pass_seconds
        ended = []
        while self.done and self.done[0][0] <= self.passes + 1e-6:
            ended.append(heapq.heappop(self.done)[1])
        self.fill()
        return ended


@dataclass
class Engines:
    replicas: list[Replica]
    now: float = 0.0

    def submit(self, requests: Iterable[tuple[int, int]]) -> None:
        for request, length in requests:
            target = min(self.replicas, key=lambda replica: len(replica.done) + len(replica.waiting))
            target.waiting.insert(0, (request, length))
        for replica in self.replicas:
            replica.fill()

    def run_until(self, end: float, is_enough: Callable[[], bool], ended: Callable[[int], None]) -> None:
        while self.now < end and not is_enough():
            # The end may lie after all that is in flight.
            seconds = min([end - self.now, *(replica.next_end() for replica in self.replicas)])
            if seconds == math.inf:
                raise RuntimeError("nothing is sampled, and something is waited for")
            for replica in self.replicas:
                for request in replica.advance(seconds):
                    ended(request)
            self.now += seconds

    def abort(self) -> tuple[list[int], float]:
        """Requests in flight, and the tokens that are thrown away."""
        requests, tokens = [], 0.0
        for replica in self.replicas:
            tokens += sum(replica.passes - began for _, _, began in replica.done)
            requests += [request for _, request, _ in replica.done] + [request for request, _ in replica.waiting]
            replica.done, replica.waiting = [], []
        return requests, tokens

    @property
    def is_idle(self) -> bool:
        return not any(replica.done or replica.waiting for replica in self.replicas)


@dataclass(frozen=True)
class Outcome:
    seconds: float
    """Of a step."""
    tokens: float
    """Trained on a second."""
    staleness: float
    idle: float
    """Share of the time in which an engine replica had nothing to do."""
    waited: float
    """Share of the time in which the trainer waited."""
    wasted: float
    """Tokens thrown away, as a share of those trained on."""


def in_turns(lengths: Callable[[int], int]) -> Outcome:
    """Four GPUs sample, then four train."""
    engines, total, trained = Engines([Replica() for _ in range(4)]), 0.0, 0
    sampled = 0.0
    for step in range(STEPS):
        begin = engines.now
        requests = [(step * PROMPTS * GROUP + i, lengths(step * PROMPTS * GROUP + i)) for i in range(PROMPTS * GROUP)]
        engines.submit(requests)
        engines.run_until(math.inf, lambda: engines.is_idle, lambda request: None)
        sampled += engines.now - begin
        tokens = sum(length for _, length in requests)
        engines.now += SYNC + tokens / (4 * TRAINED_TOKENS)
        trained += tokens
    total = engines.now
    busy = sum(replica.busy for replica in engines.replicas) / 4
    return Outcome(total / STEPS, trained / total, 0.0, 1 - busy / total, sampled / total, 0.0)


def ahead(lengths: Callable[[int], int], max_staleness: int, interrupt: str, oversample: float = 0.0) -> Outcome:
    """Two GPUs sample all the time, two train."""
    rule = Admission(max_staleness, PROMPTS, 2 * STEPS + max_staleness, oversample)
    engines = Engines([Replica() for _ in range(2)])
    unused: dict[int, int] = {}
    missing: dict[int, int] = {}
    complete: set[int] = set()
    position = trained = 0
    wasted = stale = waited = 0.0
    at_warm = (0.0, 0, 0.0, 0.0)

    def ended(request: int) -> None:
        place = request // GROUP
        if place in missing:
            missing[place] -= 1
            if not missing[place]:
                complete.add(place)

    def submit(places: Iterable[int]) -> None:
        for place in places:
            missing[place] = GROUP
            engines.submit((place * GROUP + i, lengths(place * GROUP + i)) for i in range(GROUP))

    for step in range(STEPS):
        if step == WARM:
            at_warm = engines.now, trained, waited, sum(replica.busy for replica in engines.replicas)
        new = range(position, position + rule.room(len(unused), step))
        position = new.stop
        unused |= dict.fromkeys(new, step)
        submit([*(place for place, given_out in unused.items() if given_out == step and place not in new), *new])
        begin = engines.now
        looked, chosen = -1, None

        def is_enough() -> bool:
            nonlocal looked, chosen
            if len(complete) != looked:
                looked, chosen = len(complete), rule.choose(unused, complete, step, oversample > 0)  # noqa: B023
            return chosen is not None

        engines.run_until(math.inf, is_enough, ended)
        waited += engines.now - begin
        assert chosen is not None
        complete.difference_update(chosen)
        tokens = 0
        for place in chosen:
            stale += (step - unused.pop(place)) / (PROMPTS * STEPS)
            tokens += sum(lengths(place * GROUP + i) for i in range(GROUP))
            del missing[place]
        if oversample:
            for place in rule.overdue(unused, step):
                unused[place] = step + 1
                complete.discard(place)
                wasted += sum(lengths(place * GROUP + i) for i in range(GROUP)) if missing[place] == 0 else 0
                for replica in engines.replicas:
                    entries_of_place = [one for one in replica.done if one[1] // GROUP == place]
                    wasted += sum(replica.passes - one[2] for one in entries_of_place)
                    replica.done = [one for one in replica.done if one not in entries_of_place]
                    heapq.heapify(replica.done)
                    replica.waiting = [one for one in replica.waiting if one[0] // GROUP != place]
        trained += tokens
        engines.run_until(engines.now + tokens / (2 * TRAINED_TOKENS), lambda: False, ended)
        if interrupt == "finish":
            before = engines.now
            engines.run_until(math.inf, lambda: engines.is_idle, ended)
            waited += engines.now - before
        elif interrupt == "abort":
            requests, tokens_lost = engines.abort()
            wasted += tokens_lost
            engines.submit((request, lengths(request)) for request in requests)
        engines.now += PAUSE
    seconds = engines.now - at_warm[0]
    busy = (sum(replica.busy for replica in engines.replicas) - at_warm[3]) / 2
    return Outcome(
        seconds / (STEPS - WARM), (trained - at_warm[1]) / seconds, stale, 1 - busy / seconds,
        (waited - at_warm[2]) / seconds, wasted / trained,
    )  # fmt: skip


def log_normal(request: int) -> int:
    """Median 900 tokens, a tenth above 3,300, some at the limit: as of a model that learns to reason."""
    draw = random.Random(request)
    return max(16, min(LONGEST, round(math.exp(draw.gauss(math.log(900), 1.0)))))


def recorded(path: Path) -> Callable[[int], int]:
    lengths = [int(json.loads(line)["length"]) for line in path.read_text().splitlines()]
    return lambda request: lengths[random.Random(request).randrange(len(lengths))]


def table(name: str, lengths: Callable[[int], int]) -> None:
    sampled = sorted(lengths(request) for request in range(20_000))
    print(
        f"\n{name}: mean {sum(sampled) / len(sampled):.0f} tokens, median {sampled[10_000]}, 90 % below {sampled[18_000]}, "
        f"longest {sampled[-1]}; {PROMPTS} prompts x {GROUP}"
    )
    heads = {"s/step": 7, "tokens/s": 9, "x turns": 8, "age": 5, "engine idle": 12, "trainer waits": 14, "wasted": 7}
    print(" " * 34, *(f"{head:>{width}}" for head, width in heads.items()))
    base = in_turns(lengths)
    rows = [("in turns on 4 GPUs", base)]
    rows += [(f"2 + 2 GPUs, max_staleness {k}", ahead(lengths, k, "continue")) for k in (0, 1, 2, 4)]
    rows += [(f"2 + 2, max_staleness 2, {mode}", ahead(lengths, 2, mode)) for mode in ("finish", "abort")]
    rows += [(f"2 + 2, {k}, 25 % more, carry", ahead(lengths, k, "continue", 0.25)) for k in (1, 2)]
    for label, run in rows:
        print(
            f"{label:34} {run.seconds:7.1f} {run.tokens:9,.0f} {run.tokens / base.tokens:8.2f} {run.staleness:5.2f} "
            f"{run.idle:12.0%} {run.waited:14.0%} {run.wasted:7.0%}",
            flush=True,
        )


if __name__ == "__main__":
    table("log-normal", log_normal)
    for argument in sys.argv[1:]:
        table(Path(argument).stem, recorded(Path(argument)))
