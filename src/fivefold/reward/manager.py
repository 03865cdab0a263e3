"""All sources of rewards: functions in separate processes, then a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from fivefold.distributed.ranks import Ranks
from fivefold.errors import RunError
from fivefold.reward.pool import Scoring
from fivefold.types import Group, Prompt, Sample, by_trajectory

_SECONDS = 0.5
"""Seconds between two checks whether the run is to end."""


class Scorer(Protocol):
    """Sets reward, reward_parts and reward_failed of every sample."""

    def submit(self, prompt: Prompt, *sequences: Sample) -> Scoring:
        """Begin to score the sequences of a trajectory, all with one reward."""
        ...

    def wait(self, scoring: Sequence[Scoring]) -> str | None:
        """Wait until each of these samples has its reward or has failed; return the first error."""
        ...

    def close(self) -> None: ...


class Closing(Protocol):
    """A component that was started and must be closed."""

    def close(self) -> None: ...


class RewardModel(Protocol):
    """Adds a model's score to the rewards; called on all ranks of a replica, each with its own groups."""

    def score(self, groups: list[Group]) -> str | None:
        """Add the scores of these groups; return the error of the first sample that failed."""
        ...


@dataclass(frozen=True)
class RewardManager:
    """Scores the groups of a rank, and ends the run if too many rewards fail."""

    pool: Scorer
    ranks: Ranks
    reward_model: RewardModel | None = None
    max_failed: float = 0.1
    """Largest share of samples, over all ranks, whose reward may fail."""
    log: Callable[[str], None] = print
    servers: Sequence[Closing] = ()
    """Servers of a judge and environments, which are closed with the run."""

    def submit(self, prompt: Prompt, sequences: Sequence[Sample]) -> Scoring:
        """Begin to score a trajectory while the engine still samples others; all its sequences get the same reward."""
        return self.pool.submit(prompt, *sequences)

    def finish(self, groups: list[Group], scoring: Sequence[Scoring]) -> None:
        """Wait for the rewards of this rank's groups and add those of a reward model.

        Raises RuntimeError on all ranks if too many rewards fail. Collective.
        """
        error = self._wait(scoring)
        if self.reward_model is not None:
            model_error = self.reward_model.score(groups)
            error = error or model_error
        self._check_failures(groups, error)

    def _wait(self, scoring: Sequence[Scoring]) -> str | None:
        """Wait until the rewards are there, or until the run is to end; return the first error."""
        thread = ThreadPoolExecutor(1)
        done = thread.submit(self.pool.wait, scoring)
        # Do not wait for the thread: if the run is to end, a function may still run for some time.
        thread.shutdown(wait=False)
        while not wait([done], timeout=_SECONDS).done:
            if self.ranks.heartbeat.check():
                return None
        return done.result()

    def _check_failures(self, groups: list[Group], first_error: str | None) -> None:
        samples = [sequences[0] for group in groups for sequences in by_trajectory(group.samples)]
        failed, total = self.ranks.all_reduce_sum_world([sum(sample.reward_failed for sample in samples), len(samples)])
        if not failed:
            return
        error = next(text for text in self.ranks.gather_objects(first_error) if text is not None)
        message = f"the reward of {failed:.0f} of {total:.0f} samples failed; the first error:\n{error}"
        if failed > self.max_failed * total:
            raise RunError(
                f"{message}\nreward.max_failed = {self.max_failed:g} is the largest share of failures that a run survives"
            )
        self.log(message)

    def close(self) -> None:
        """End the reward processes, a judge's servers and environments."""
        self.pool.close()
        for server in self.servers:
            server.close()
