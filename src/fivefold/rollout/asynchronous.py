"""Groups that are sampled ahead of the step that trains on them: engines continue to sample while the trainer trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from fivefold.data.prompt_loader import Loader
from fivefold.errors import UserError
from fivefold.interfaces import EngineState, Load
from fivefold.observability.run_logger import RunLogger
from fivefold.reward.pool import Scoring
from fivefold.rollout.generation import Generator, first_numbers
from fivefold.rollout.group_files import Read, digest_of, read_groups, write_groups
from fivefold.rollout.logprob_steps import LogprobSteps
from fivefold.rollout.open_groups import Wanted, open_groups
from fivefold.rollout.staleness import Admission, oldest_version, staleness
from fivefold.rollout.stats import Informative
from fivefold.rollout.trajectories import Part
from fivefold.types import Group, Prompt, Sampling, by_trajectory

_POLL_SECONDS = 0.05
"""Seconds between two synchronizations of the ranks on which groups are complete."""
FILE = "groups-{:05d}.safetensors"
_SAMPLED_FROM = ("data.", "engine.sampling.", "environment.", "model.", "reward.", "trainer.seed")
"""Starts of the keys that decide which responses and rewards a place in the run has."""


def _read_all(directory: Path, log: RunLogger) -> Iterator[Read]:
    """Yield what the files of groups hold, except for those that another version of the program wrote."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            yield read_groups(path)
        except UserError as error:
            log.log(f"{error}: the prompts of its groups are sampled again")


class AsyncRollouts:
    """A RolloutSource that gives out, samples and scores groups before the step that takes them.

    Every rank samples the prompts whose place in the run belongs to it (place mod engine replicas). All ranks store the same
    record of the groups that are given out and unused. Completed groups are exchanged between ranks while a step waits.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: Loader[Prompt],
        log: RunLogger,
        sampling: Sampling,
        admission: Admission,
        *,
        seed: int,
        group_size: int,
        tail: Literal["wait", "carry", "drop"] = "wait",
        capacity: int = 0,
        most_prompts: int = 0,
        informative: Informative | None = None,
        logprobs: LogprobSteps | None = None,
    ) -> None:
        """`tail`: for groups that no later step may use, wait for them, sample their prompts again, or drop them.

        `capacity`: requests that the engine can have in flight, over all its replicas. `most_prompts`: maximum prompts of a
        step with dynamic sampling (DAPO, 2503.14476, section 3.2), up to which groups without reward variance are left out.
        `informative`: defines those groups, as in DynamicSampling. `logprobs`: steps in which the engine returns log-probs;
        None: every step.
        """
        self._generator, self._prompts, self._log, self._sampling = generator, prompts, log, sampling
        self._admission, self._seed, self._group_size, self._tail = admission, seed, group_size, tail
        self._capacity, self._most_prompts, self._informative = capacity, most_prompts, informative or Informative()
        self._engine, self._ranks, self._logprobs = generator.engine, generator.rewards.ranks, logprobs
        self._open = open_groups(generator)
        self._position = 0
        """Number of prompts given out."""
        self._unused: dict[int, int] = {}
        """Place in the run -> step before which it was given out, of all ranks."""
        self._versions: list[tuple[int, int]] = []
        """(step, optimizer steps taken before it) of the last steps, back to the oldest unused group."""
        self._began = -1
        self._cached: tuple[int, list[Prompt], list[int]] = (-1, [], [])

    def begin(self, step: int, sync: Callable[[], None]) -> None:
        """Sync the weights, then give out the groups that may be sampled with them; none after the run's end."""
        sync()
        self._begin(step)

    def _begin(self, step: int) -> None:
        """Give out groups once the engine has the weights of `step`."""
        if step == self._began or self._admission.room(0, step) == 0:
            return
        if self._began < 0:
            # Reset the load statistics: startup time is not waiting time.
            self._open.load()
        self._began = step
        # Only happens if `max_staleness` was changed after they were given out.
        for place in self._admission.overdue(self._unused, step - 1):
            self._open.discard(place)
            self._unused[place] = step
        # A repeated step already has an entry, with the weights it had then.
        oldest = min([step, *self._unused.values()])
        self._versions = [entry for entry in self._versions if oldest <= entry[0] <= step] + [(step, self._engine.version)]
        self._give_out(step)

    def _give_out(self, step: int) -> None:
        for _ in range(self._admission.room(len(self._unused), step)):
            self._unused[self._position] = step
            self._position += 1
        replica = self._engine.replica
        # A run resumed with another bound may have more unused groups than allowed; the surplus is not due yet.
        for place in sorted(self._unused)[: self._admission.room(0, step)]:
            if replica.owns(place) and place not in self._open:
                self._open.ask(self._wanted(place))

    def _wanted(self, place: int) -> Wanted:
        """Return the group of a place, with the random draws of the step that would take it if nothing were sampled
        ahead."""
        begin = place - place % self._admission.per_step
        prompts, numbers = self._of_step(begin)
        prompt, first = prompts[place - begin], numbers[place - begin]
        step = begin // self._admission.per_step
        sampling = self._sampling if self._logprobs is None else self._logprobs.of(self._sampling, step)
        return Wanted(place, prompt, self._group_size, first, (self._seed, step), sampling)

    def _of_step(self, begin: int) -> tuple[list[Prompt], list[int]]:
        """Return the prompts of the step that starts at place `begin`, and the number of the first response to each."""
        if self._cached[0] != begin:
            prompts = self._prompts.take(begin, self._admission.per_step)
            self._cached = begin, prompts, first_numbers(prompts, self._group_size)
        return self._cached[1:]

    def next(self, step: int) -> list[Group]:
        """Return this rank's groups of the step."""
        self._begin(step)
        self._log.record({"epoch": float(self._prompts.epoch(min(self._unused)))})
        began, waited = time.monotonic(), 0
        left_out: list[int] = []
        self._open.collect(0.0)
        while (chosen := self._choice(step, left_out)) is None:
            self._open.collect(_POLL_SECONDS)
            self._log.advance(waited := waited + 1, 0)
            self._engine.look_after()
            if self._engine.state is EngineState.LOST:
                assert self._generator.refresh is not None
                self._generator.refresh()
        seconds = time.monotonic() - began
        groups: list[Group] = []
        scoring: list[Scoring] = []
        for index, place in enumerate([*chosen, *left_out]):
            self._unused.pop(place, None)
            if (group := self._open.take(place)) is not None:
                groups.append(replace(group.in_order(index), is_used=index < len(chosen)))
                scoring += group.scoring
        with self._log.stage("reward"):
            self._generator.rewards.finish(groups, scoring)
        samples = [sample for group in groups for sample in group.samples]
        stale = [staleness(self._versions, oldest_version(sample), step) for sample in samples]
        self._admission.check(stale, step)
        cut = self._cut(step) if self._tail != "wait" else 0
        self._record(stale, cut, seconds)
        if self._most_prompts:
            total, informative = len(chosen) + len(left_out), sum(chosen.values())
            self._log.record(
                {
                    "dynamic_sampling/prompts": float(total),
                    "dynamic_sampling/kept_fraction": informative / total,
                    "dynamic_sampling/zero_variance_used": float(len(chosen) - informative),
                }
            )
        return groups

    def _choice(self, step: int, left_out: list[int]) -> dict[int, bool] | None:
        """Return the groups that the step takes and whether each is informative; None until they are complete. Collective.

        The result is the same on all ranks. Groups that the step leaves out are appended to `left_out`.
        """
        mine = [[place, self._informative(group.samples)] for place, group in self._open.complete()]
        rows = self._ranks.all_gather_world(torch.tensor(mine, dtype=torch.long).view(-1, 2))
        ready = {place: bool(differs) for place, differs in torch.cat(rows).tolist() if place in self._unused}
        if self._most_prompts and self._leave_out(ready, left_out):
            self._give_out(step)
        chosen = self._admission.choose(self._unused, [*ready], step, cuts=self._tail != "wait")
        return None if chosen is None else {place: ready[place] for place in chosen}

    def _leave_out(self, ready: dict[int, bool], left_out: list[int]) -> bool:
        """Remove groups without reward variance from those that the step would take; return whether there were any."""
        before, wanted = len(left_out), 0
        for place in sorted(self._unused):
            if wanted == self._admission.per_step or (place not in ready and self._tail == "wait"):
                # Later groups are examined once this one is complete, or by a later step.
                break
            if place not in ready:
                continue
            if ready[place] or len(left_out) + self._admission.per_step >= self._most_prompts:
                wanted += 1
            else:
                left_out.append(place)
                del self._unused[place], ready[place]
        return len(left_out) > before

    def _cut(self, step: int) -> int:
        """Discard groups that no later step may use, and return their number."""
        overdue = self._admission.overdue(self._unused, step)
        for place in overdue:
            self._open.discard(place)
            if self._tail == "drop":
                del self._unused[place]
            else:
                # The group is given out again before the next step.
                self._unused[place] = step + 1
        return len(overdue)

    def _record(self, stale: list[int], cut: int, seconds: float) -> None:
        """Record the metrics of the step over all ranks. Collective."""
        stale_N = torch.cat(self._ranks.all_gather_world(torch.tensor(stale, dtype=torch.long)))
        complete = sum(1 for _ in self._open.complete())
        load = self._open.load() or Load(0.0, 0.0, 0.0, [])
        if self._engine.replica.index is None:
            # A rank without an engine replica has no requests, so its waiting does not count.
            load = Load(0.0, 0.0, 0.0, [])
        tokens = self._open.take_tokens()
        numbers = [complete, tokens.aborted, tokens.reused, load.request_seconds, load.idle_seconds, load.seconds]
        waiting, aborted, reused, busy, idle, total = self._ranks.all_reduce_sum_world([float(number) for number in numbers])
        record = {
            "async/staleness_mean": float(stale_N.double().mean()),
            "async/staleness_max": float(stale_N.max()),
            **{f"async/staleness_{age}": float((stale_N == age).double().mean()) for age in stale_N.unique().tolist()},
            "async/unused_groups": float(len(self._unused)),
            "async/complete_groups": waiting,
            "async/trainer_wait_seconds": seconds,
            "async/aborted_tokens": aborted,
            "async/reused_tokens": reused,
            "async/cut_groups": float(cut),
        }
        if total:
            ranks = self._ranks.layout.world_size
            record["async/engine_wait_seconds"] = idle / ranks
            record["async/engine_load"] = busy / (total / ranks) / self._capacity
        self._log.record(record)
        self._open.record()
        self._log.curve("requests in flight", load.curve)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "unused": sorted(self._unused.items()), "versions": list(self._versions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; also accepts that of a synchronous run, which has given out nothing ahead."""
        self._position = int(state["position"])
        self._unused = {int(place): int(step) for place, step in state.get("unused", ())}
        self._versions = [(int(step), int(version)) for step, version in state.get("versions", ())]

    def snapshot(self) -> Callable[[Path], list[Path]]:
        """Copy this rank's fully sampled groups. The returned function writes them into a directory and returns its
        files."""
        copies = self._open.copies()

        def write(directory: Path) -> list[Path]:
            path = directory / FILE.format(self._ranks.rank)
            write_groups(path, *copies)
            return [path]

        return write

    def load(self, directory: Path, changed: Collection[str] = ()) -> None:
        """Load this rank's groups from the files that ranks of any layout wrote; the other groups are sampled again.

        A group whose place has another prompt now is sampled again, and so are all of them where `changed` names a key
        that decides what is sampled or how it is scored.
        """
        if keys := [key for key in changed if key.startswith(_SAMPLED_FROM)]:
            self._log.log(f"changed: {', '.join(keys)}; the prompts whose groups wait in the checkpoint are sampled again")
            return
        for groups, scored, parts, counts, prompts in _read_all(directory, self._log):
            of_place: dict[int, list[Part]] = {}
            for part in parts:
                of_place.setdefault(part.place, []).append(part)
            for place in [*groups, *of_place]:
                if not self._engine.replica.owns(place) or place not in self._unused:
                    continue
                wanted, events = self._wanted(place), counts.get(place, {})
                # Older files have no digests.
                if prompts.get(place, digest := digest_of(wanted.prompt)) != digest:
                    continue
                if place in groups:
                    if len(by_trajectory(groups[place])) == self._group_size:
                        self._open.restore(wanted, groups[place], events, is_scored=place in scored)
                elif max(part.number for part in of_place[place]) < self._group_size:
                    self._open.resume(wanted, of_place[place], events)
