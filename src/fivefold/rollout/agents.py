"""Trajectories of agents: the agent runs in an environment process and samples its turns through the endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fivefold.config.environment import REWARD, EnvironmentConfig
from fivefold.data.dialog import Dialog
from fivefold.environments.pool import EnvironmentFailure, EnvironmentPool, Place
from fivefold.interfaces import Engine
from fivefold.rollout.conversations import Conversations, task_of
from fivefold.rollout.driver import Driver, Steps
from fivefold.rollout.endpoint import Address, Endpoint
from fivefold.rollout.sessions import Session
from fivefold.rollout.trajectories import Clock, Trajectory
from fivefold.types import Completion, Request, Sampling

_WITHOUT_NAME = "reward"
"""Name of the reward of an agent that returned a number."""


class Agents(Conversations):
    """Samples trajectories of agents."""

    def __init__(
        self,
        config: EnvironmentConfig,
        dialog: Dialog,
        pool: EnvironmentPool,
        max_tokens: int,
        endpoint: Endpoint,
        needs_reward: bool,
    ) -> None:
        """`needs_reward`: whether the reward `environment` has a weight, so an agent must return one."""
        super().__init__(config, dialog, pool, max_tokens)
        self._endpoint, self._needs_reward = endpoint, needs_reward

    def driver(self, engine: Engine) -> Driver:
        return Driver(engine, self)

    def steps(self, held: Trajectory, sampling: Sampling, driver: Driver) -> Steps:
        """Take a trajectory to its end; a failure of its agent is its own end.

        A program cannot continue where a checkpoint has left it: one that was not at its end begins again.
        """
        held.forget()
        place: Place | None = None
        address: Address | None = None
        rewards: Mapping[str, float] | str | None = None
        failure: EnvironmentFailure | None = None
        reset = self._pool.reset(task_of(held.task.prompt), held.task.seed)
        try:
            place, _ = yield reset
            held.clock = Clock(self._config.trajectory_seconds)
            held.clock.run()
            address = self._endpoint.open(held.task.draw, sampling, partial(_ask, driver, held))
            rewards = yield self._pool.run(place, address.base_url, address.api_key, lambda: held.clock.left)
        except EnvironmentFailure as error:
            failure = error
        except GeneratorExit:
            if place is None:
                reset.add_done_callback(self._leave_late)
            raise
        finally:
            if address is not None:
                ended = self._endpoint.end(address)
            if place is not None:
                self._pool.leave(place)
        if address is not None:
            # Answers that were read until now are marked as such.
            yield ended
            address.session.record(held)
        self._finish(held, None if address is None else address.session, rewards, failure)

    def _finish(
        self,
        held: Trajectory,
        session: Session | None,
        rewards: Mapping[str, float] | str | None,
        failure: EnvironmentFailure | None,
    ) -> None:
        """Set the end of a trajectory, its reward, and why it failed if it did."""
        refused = None if session is None else session.refused
        held.end = "done" if refused is None else refused
        if session is not None and session.fault is not None:
            error: str | None = session.fault
        elif failure is not None and failure.is_late and not held.clock.left:
            held.end, error = "time", None
        elif failure is not None and refused is None:
            error = str(failure)
        elif isinstance(rewards, str):
            error = rewards
        elif failure is None and rewards is None and self._needs_reward:
            error = (
                "an agent returns its reward, a finite number or several by name: got none; return one, or score with "
                f"reward.functions and set {REWARD}: 0 there"
            )
        else:
            error = None
        if error is not None:
            held.end = "agent"
        elif not held.sequences:
            error = "the agent ended without an answer that it has read: it requests its turns at base_url with api_key"
            held.end = refused or "agent"
        if error is not None:
            held.error = error
            held.count("environment/failed", held.end == "agent")
            return
        if isinstance(rewards, Mapping):
            held.rewards = {} if list(rewards) == [_WITHOUT_NAME] else dict(rewards)
            # The last turn, in whichever sequence it is.
            last = max(held.sequences, key=lambda sequence: sequence.turns[-1].number)
            last.turns[-1] = replace(last.turns[-1], given=sum(rewards.values()))


def _ask(driver: Driver, held: Trajectory, request: Request) -> Future[Completion]:
    """Request a turn of a trajectory; the future is cancelled if the trajectory has ended."""
    with suppress(KeyError):
        return driver.ask(held, request)
    ended: Future[Completion] = Future()
    ended.cancel()
    return ended
