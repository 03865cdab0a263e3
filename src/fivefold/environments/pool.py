"""Environments of a rank's trajectories, in processes that a thread with an event loop talks to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fivefold.config.environment import EnvironmentConfig
from fivefold.environments import worker
from fivefold.environments.kinds import AGENT, KINDS, kind_of
from fivefold.errors import UserError, shown
from fivefold.reward.pool import clean_environment, cores_of_rank

T = TypeVar("T")
_START_SECONDS = 300.0
"""Seconds for a process to import what its environments need."""
_GRACE_SECONDS = 2.0
"""Seconds for a process to confirm that it has cancelled a call; after them it is killed."""
_LEAST_WAIT = 0.1
"""Seconds between two looks at a clock that may be held."""
_MOST_LATE = 16
"""Calls of a process that took too long, after which it gets no further environment: their threads may still run."""
_CLOSE_SECONDS = 5.0
"""Seconds for environments to close at the end of a run."""
_OF_OWN_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that another interpreter must not get."""


class EnvironmentFailure(Exception):  # noqa: N818 - it fails one trajectory, not the run
    """Raised with the reason why an environment or a tool gave no answer."""

    def __init__(self, reason: str, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late
        """True if the time limit was exceeded."""


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to one tool call."""

    text: str
    seconds: float = 0.0
    is_error: bool = False
    is_late: bool = False


@dataclass(eq=False)
class Place:
    """A trajectory's environment in one of the processes."""

    number: int
    process: _Process
    leaving: asyncio.Future[None] | None = None
    """The end of the environment, once it has begun."""


def variables_of(config: EnvironmentConfig) -> dict[str, str]:
    """Return the variables of environment processes."""
    variables = clean_environment(config.variables)
    if config.python is None:
        return variables
    return {name: value for name, value in variables.items() if name not in _OF_OWN_PYTHON}


class EnvironmentPool:
    """Environments in worker processes; a call that hangs, raises or dies fails its own trajectory only."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._processes: list[_Process] = []
        self._numbers = count()
        kind, _ = kind_of(config.class_ or "")
        self._per_process = 1 if kind in KINDS and KINDS[kind].is_alone else config.per_worker
        self._room = asyncio.Semaphore(self.capacity)
        self._starts = asyncio.Semaphore(max(2, cores_of_rank()))
        """Processes that start at the same time, since each imports libraries."""
        self._abilities: dict[str, bool] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def start(self) -> list[dict[str, Any]]:
        """Start the first process and return the schemas of the tools; raises UserError if something cannot be loaded."""
        try:
            return self._call(self._begin()).result()
        except EnvironmentFailure as error:
            self.close()
            reason = str(error)
            start = (
                ""
                if reason.startswith("environment.")
                else "environment: the class, the tools or the agent cannot be loaded:\n"
            )
            raise UserError(f"{start}{reason}") from error

    @property
    def has_class(self) -> bool:
        return self._config.class_ is not None

    @property
    def capacity(self) -> int:
        """Number of environments that run at the same time; `reset` of a further one waits until another is left."""
        return self._config.max_processes * self._per_process

    @property
    def is_stateless(self) -> bool:
        """Whether nothing of a trajectory is kept here, so that any other process continues it; False before the start."""
        return self._abilities.get("is_stateless", False)

    @property
    def is_replayable(self) -> bool:
        """Whether the same messages after the same reset lead to the same answers; False before the start."""
        return self._abilities.get("is_replayable", False)

    @property
    def has_score(self) -> bool:
        """Whether a trajectory that ends before its environment does has a reward of its own, which `score` returns."""
        return self._abilities.get("has_score", False)

    def reset(self, task: dict[str, Any], seed: int, restore: dict[str, Any] | None = None) -> Future[tuple[Place, Any]]:
        """Make an environment, in the state `restore` if given; the future holds its place and first context.

        The first context is that of a new environment, and None without a class. Waiting for a place has no time limit.
        """

        async def run() -> tuple[Place, Any]:
            place = await self._enter()
            try:
                arguments = {"environment": place.number, "task": task, "seed": seed, "restore": restore}
                return place, await place.process.ask("reset", arguments, self._config.reset_seconds)
            except EnvironmentFailure:
                await self._leave(place)
                raise

        return self._call(run())

    def state(self, place: Place) -> Future[dict[str, Any] | None]:
        """Return a future of the state from which `reset` restores the environment; None if a class or tool gives none."""

        async def run() -> dict[str, Any] | None:
            if not self._abilities["has_state"]:
                return None
            state: dict[str, Any] = await place.process.ask(
                "state", {"environment": place.number}, self._config.step_seconds
            )
            return state

        return self._call(run())

    def score(self, place: Place) -> Future[float]:
        """Return a future of the reward of a trajectory that ends before its environment does; see `has_score`."""
        return self._call(place.process.ask("score", {"environment": place.number}, self._config.step_seconds))

    def run(
        self, place: Place, base_url: str, api_key: str, left: Callable[[], float]
    ) -> Future[dict[str, float] | str | None]:
        """Run a trajectory's agent; the future holds its rewards by name, None if it returned none, or why they are none.

        `left`: returns the seconds that are left for it, which need not pass all the time.
        """
        arguments = {"environment": place.number, "base_url": base_url, "api_key": api_key}
        return self._call(place.process.ask("run", arguments, left(), left))

    def step(self, place: Place, message: dict[str, Any], seconds: float) -> Future[dict[str, Any]]:
        """Take a step; the future holds messages, reward, done and state."""
        limit = min(seconds, self._config.step_seconds)
        return self._call(place.process.ask("step", {"environment": place.number, "message": message}, limit))

    def call(self, place: Place, calls: Sequence[tuple[str, dict[str, Any]]], seconds: float) -> Future[list[ToolAnswer]]:
        """Call several tools at once; the future holds an answer for each, which may be an error."""
        limit = min(seconds, self._config.step_seconds)

        async def one(name: str, arguments: dict[str, Any]) -> ToolAnswer:
            begin = time.monotonic()
            try:
                request = {"environment": place.number, "name": name, "arguments": arguments}
                text, failure = await place.process.ask("call", request, limit), None
            except EnvironmentFailure as error:
                text, failure = str(error), error
            late = failure is not None and failure.is_late
            return ToolAnswer(str(text), time.monotonic() - begin, failure is not None, late)

        async def run() -> list[ToolAnswer]:
            return list(await asyncio.gather(*(one(*name_and_arguments) for name_and_arguments in calls)))

        return self._call(run())

    def leave(self, place: Place) -> None:
        """Close an environment; nothing waits for that."""
        if self._loop.is_running():
            self._call(self._leave(place))

    def close(self) -> None:
        """Close the environments that are left, and end the processes."""
        if not self._loop.is_running():
            return
        self._call(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        places = [place for process in self._processes for place in process.places]
        if places:
            await asyncio.wait([asyncio.ensure_future(self._leave(place)) for place in places], timeout=_CLOSE_SECONDS)
        for process in self._processes:
            process.kill()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _begin(self) -> list[dict[str, Any]]:
        place = await self._enter()
        self._abilities = place.process.abilities
        await self._leave(place)
        return place.process.tools

    async def _enter(self) -> Place:
        """Return a place for another environment, in a new process if the others are full.

        The place is taken before the process has started, so that it is not given away meanwhile.
        """
        await self._room.acquire()
        self._processes = [process for process in self._processes if not process.has_ended]
        free = (process for process in self._processes if len(process.places) < self._per_process and not process.is_worn)
        if (process := next(free, None)) is None:
            process = _Process(self._config, self._starts)
            self._processes.append(process)
        place = Place(next(self._numbers), process)
        process.places.add(place)
        try:
            await process.started
        except EnvironmentFailure:
            await self._leave(place)
            raise
        return place

    async def _leave(self, place: Place) -> None:
        if place.leaving is None:
            place.leaving = asyncio.ensure_future(self._close(place))
        await asyncio.shield(place.leaving)

    async def _close(self, place: Place) -> None:
        try:
            if place.process.started.done() and not place.process.has_ended:
                with contextlib.suppress(EnvironmentFailure):
                    await place.process.ask("close", {"environment": place.number}, self._config.step_seconds)
        finally:
            place.process.places.discard(place)
            if place.process.is_worn and not place.process.places:
                place.process.kill()
            self._room.release()


class _Process:
    """One worker process; all methods run in the thread of the pool, except `kill`."""

    def __init__(self, config: EnvironmentConfig, starts: asyncio.Semaphore) -> None:
        self.places: set[Place] = set()
        self.tools: list[dict[str, Any]] = []
        self.abilities: dict[str, bool] = {}
        self.has_ended = False
        self._late = 0
        self._config, self._starts = config, starts
        self._process: subprocess.Popen[bytes] | None = None
        self.started = asyncio.ensure_future(self._start())
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def is_worn(self) -> bool:
        """Whether so many calls have hung that the process is replaced once its environments have ended."""
        return self._late >= _MOST_LATE

    async def _start(self) -> None:
        async with self._starts:
            if self.has_ended:
                raise EnvironmentFailure("the environment's process has ended")
            ours = self._spawn()
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=worker.LONGEST)
            self._reading = asyncio.create_task(self._read())
            config = self._config
            kind, name = kind_of(config.class_ or "") if config.agent is None else (AGENT, config.agent)
            settings = {
                "memory_mb": config.memory_mb,
                "max_turns": config.max_turns,
                "options": config.options,
                "seconds": config.reset_seconds,
            }
            request = {"kind": kind, "name": name or None, "tools": config.tools, "settings": settings}
            try:
                answer = await self.ask("load", request, _START_SECONDS)
            except EnvironmentFailure:
                self.kill()
                raise
            self.tools = answer.pop("tools")
            self.abilities = answer

    def _spawn(self) -> socket.socket:
        """Start the process, and return the socket to it."""
        ours, theirs = socket.socketpair()
        config = self._config
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [config.python or sys.executable, str(Path(worker.__file__)), str(theirs.fileno())],
                    env=variables_of(config),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # Processes started by an environment are in the same group, and are killed with it.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self.has_ended = True
                reason = f"environment.python must be a Python interpreter: {config.python} cannot be started: {error}"
                raise EnvironmentFailure(reason) from error
        return ours

    async def ask(self, do: str, arguments: dict[str, Any], seconds: float, left: Callable[[], float] | None = None) -> Any:
        """Return the answer of the process; raises EnvironmentFailure without one in time, or once no time is `left`.

        A call that is too late is cancelled. If the process does not confirm that, it is killed with all its environments.
        """
        if self.has_ended:
            raise EnvironmentFailure("the environment's process has ended")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "do": do, "arguments": arguments})
            done, _ = await asyncio.wait([answer], timeout=seconds)
            while not done and left is not None and (rest := left()):
                done, _ = await asyncio.wait([answer], timeout=max(rest, _LEAST_WAIT))
            if not done:
                self._late += 1
                self._send({"do": "cancel", "of": number})
                if not (await asyncio.wait([answer], timeout=_GRACE_SECONDS))[0]:
                    self.kill()
                raise EnvironmentFailure(f"{do} took longer than {seconds:g} s", is_late=True)
            return answer.result()
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                # Marks the error as seen.
                answer.exception()

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message, default=str).encode() + b"\n")

    async def _read(self) -> None:
        """Hand each answer to the caller that waits for it, until the process ends or sends what is no answer."""
        reason = ""
        try:
            while line := await self._reader.readline():
                answer = _read_answer(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is None or waiting.done():
                    continue
                if "error" in answer:
                    waiting.set_exception(EnvironmentFailure(str(answer["error"])))
                else:
                    waiting.set_result(answer["value"])
        except OSError:
            pass
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            reason = f" because it sent what is no answer ({type(error).__name__}: {error})"
        ended = self.kill() + reason
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentFailure(f"the environment's process {ended}"))

    def kill(self) -> str:
        """Kill the process and its children, and return how it ended."""
        self.has_ended = True
        if self._process is None:
            return "has not started"
        if self._process.returncode is None:
            # A process that has ended by itself keeps its exit code until it is waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _read_answer(line: bytes) -> dict[str, Any]:
    """Return an answer of a process; half a character becomes a question mark, since no tokenizer takes one."""
    answer = json.loads(line)
    if b"\\u" in line:
        answer = json.loads(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))
    if not isinstance(answer, dict):
        raise TypeError(f"an answer is an object: got {shown(answer)}")
    return answer
