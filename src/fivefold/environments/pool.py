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
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from fivefold.config.environment import EnvironmentConfig
from fivefold.environments import worker
from fivefold.errors import UserError
from fivefold.reward.pool import clean_environment

T = TypeVar("T")
_START_SECONDS = 300.0
"""Seconds for a process to import what its environments need."""
_GRACE_SECONDS = 2.0
"""Seconds for a process to confirm that it has cancelled a call; after them it is killed."""
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


class EnvironmentPool:
    """Environments in worker processes; a call that hangs, raises or dies fails its own trajectory only."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._processes: list[_Process] = []
        self._numbers = count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def start(self) -> list[dict[str, Any]]:
        """Start the first process and return the schemas of the tools; raises UserError if something cannot be loaded."""
        try:
            return self._call(self._free()).result().tools
        except EnvironmentFailure as error:
            self.close()
            raise UserError(f"environment: the class or the tools cannot be loaded:\n{error}") from error

    @property
    def has_class(self) -> bool:
        return self._config.class_ is not None

    def reset(self, task: dict[str, Any], seed: int) -> Future[tuple[Place, Any]]:
        """Make an environment; the future holds its place and first context, None without a class."""

        async def run() -> tuple[Place, Any]:
            process = await self._free()
            place = Place(next(self._numbers), process)
            process.places.add(place)
            if not self.has_class:
                return place, None
            try:
                arguments = {"environment": place.number, "task": task, "seed": seed}
                return place, await process.ask("reset", arguments, self._config.reset_seconds)
            except EnvironmentFailure:
                await self._leave(place)
                raise

        return self._call(run())

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
                text, failure = await place.process.ask("call", {"name": name, "arguments": arguments}, limit), None
            except EnvironmentFailure as error:
                # The last line of a traceback is the error itself.
                text, failure = str(error).strip().rpartition("\n")[2], error
            late = failure is not None and failure.is_late
            return ToolAnswer(str(text), time.monotonic() - begin, failure is not None, late)

        async def run() -> list[ToolAnswer]:
            return list(await asyncio.gather(*(one(*each) for each in calls)))

        return self._call(run())

    def leave(self, place: Place) -> None:
        """Close an environment; nothing waits for that."""
        if self._loop.is_running():
            self._call(self._leave(place))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _free(self) -> _Process:
        """Return a process with room for another environment; a new one if there is none."""
        self._processes = [process for process in self._processes if not process.has_ended]
        free = (process for process in self._processes if len(process.places) < self._config.per_worker)
        if (process := next(free, None)) is None:
            process = _Process(self._config)
            self._processes.append(process)
        await process.started
        return process

    async def _leave(self, place: Place) -> None:
        place.process.places.discard(place)
        if self.has_class and not place.process.has_ended:
            with contextlib.suppress(EnvironmentFailure):
                await place.process.ask("close", {"environment": place.number}, self._config.step_seconds)


class _Process:
    """One worker process; all methods run in the thread of the pool, except `kill`."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.places: set[Place] = set()
        self.tools: list[dict[str, Any]] = []
        self.has_ended = False
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        own, theirs = socket.socketpair()
        variables = clean_environment(config.variables)
        if config.python is not None:
            variables = {name: value for name, value in variables.items() if name not in _OF_OWN_PYTHON}
        with theirs:
            self._process = subprocess.Popen(
                [config.python or sys.executable, str(Path(worker.__file__)), str(theirs.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Processes started by an environment are in the same group, and are killed with it.
                start_new_session=True,
            )
        self.started = asyncio.ensure_future(self._start(own, config))

    async def _start(self, own: socket.socket, config: EnvironmentConfig) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=own, limit=worker.LONGEST)
        self._reading = asyncio.create_task(self._read())
        settings = {"name": config.class_, "tools": config.tools, "memory_mb": config.memory_mb}
        try:
            self.tools = (await self.ask("load", settings, _START_SECONDS))["tools"]
        except EnvironmentFailure:
            self.kill()
            raise

    async def ask(self, do: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Return the answer of the process; raises EnvironmentFailure without one in time.

        A call that is too late is cancelled. If the process does not confirm that, it is killed with all its environments.
        """
        if self.has_ended:
            raise EnvironmentFailure("the environment's process has ended")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "do": do, "arguments": arguments})
            done, _ = await asyncio.wait([answer], timeout=seconds)
            if not done:
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
        """Hand each answer to the caller that waits for it, until the process ends."""
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is None or waiting.done():
                    continue
                if "error" in answer:
                    waiting.set_exception(EnvironmentFailure(answer["error"]))
                else:
                    waiting.set_result(answer["value"])
        ended = self.kill()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentFailure(f"the environment's process {ended}"))

    def kill(self) -> str:
        """Kill the process and its children, and return how it ended."""
        self.has_ended = True
        if self._process.returncode is None:
            # A process that has ended by itself keeps its exit code until it is waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
