"""One rank's requests, spread over servers by load."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby
from typing import Any, cast

from fivefold.engines.servers.server import Answer, Server, ServerLostError
from fivefold.types import Completion, Request

_SILENCE, _MOST_SILENCES = 10.0, 6
"""Seconds without a completion after which servers are asked whether they are still there, and how often in vain."""
Arrival = tuple[int, Completion | list[Request] | Exception]
"""Number of a server, and what it sampled, what it had when it was lost, or another error."""


class RequestRouter:
    """Gives requests to servers, all of a prompt to one of them, and takes back what a server had when it ended."""

    def __init__(self, rank: int, window: int, log: Callable[[str], None]) -> None:
        """`window`: most requests of this rank that a server has at once."""
        self._rank, self._window, self._log = rank, window, log
        self._loop = asyncio.new_event_loop()
        self._numbers = count()
        self._waiting: deque[list[Request]] = deque()
        self._aborted: list[Request] = []
        self._servers: Sequence[Server] = ()
        self._lost: set[int] = set()
        self._version: Callable[[], int] = int

    def completions(
        self, requests: Sequence[Request], servers: Sequence[Server], lost: set[int], version: Callable[[], int]
    ) -> Iterator[Completion]:
        """One of each request, as they finish; fewer where no server is left. `lost` gets the servers that are gone."""
        self._servers, self._lost, self._version = servers, lost, version
        # One server answers all requests of a prompt: it computes the prompt once.
        self._waiting = deque(list(run) for _, run in groupby(requests, lambda one: (one.prompt_ids, one.sampling)))
        self._aborted = []
        arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        loads, silences = [0] * len(self._servers), [0] * len(self._servers)
        asked: dict[asyncio.Task[None], int] = {}
        try:
            while self._waiting or self._aborted or any(loads):
                while self._aborted:
                    yield Completion(self._aborted.pop().id, [], [], "abort", version())
                while self._waiting and (number := self._freest(loads)) is not None:
                    run = self._waiting.popleft()
                    loads[number] += len(run)
                    task = self._loop.create_task(self._ask(number, run, arrivals))
                    asked[task] = number
                    task.add_done_callback(asked.pop)
                if not any(loads):
                    return
                try:
                    number, what = self._loop.run_until_complete(asyncio.wait_for(arrivals.get(), _SILENCE))
                except TimeoutError:
                    self._look_after(silences, asked)
                    continue
                silences[number] = 0
                if isinstance(what, Exception):
                    raise what
                if isinstance(what, Completion):
                    loads[number] -= 1
                    yield what
                else:
                    loads[number] -= len(what)
                    self._lost.add(number)
                    if what:
                        self._waiting.appendleft(what)
        finally:
            # Whoever asked may have gone away: servers end what nobody waits for.
            left = list(asked)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))

    def abort(self) -> None:
        """What waits here is given back as it is; what servers have is theirs to end."""
        self._aborted += [request for run in self._waiting for request in run]
        self._waiting.clear()

    def _freest(self, loads: Sequence[int]) -> int | None:
        """The server with the fewest requests of this rank; ranks begin with different ones."""
        free = [number for number, load in enumerate(loads) if load < self._window and number not in self._lost]
        return min(free, key=lambda number: (loads[number], (number - self._rank) % len(loads)), default=None)

    async def _ask(self, number: int, run: list[Request], arrivals: asyncio.Queue[Arrival]) -> None:
        missing = {request.id: request for request in run}
        name, first = f"{self._rank}-{next(self._numbers)}", run[0]
        draws, asked_at = [(request.id, request.seed) for request in run], self._version()
        try:
            async for answer in self._servers[number].generate(name, first.prompt_ids, first.sampling, draws):
                del missing[answer[0]]
                arrivals.put_nowait((number, self._completion(answer, asked_at)))
        except (ServerLostError, asyncio.CancelledError):
            arrivals.put_nowait((number, list(missing.values())))
        except Exception as error:
            arrivals.put_nowait((number, error))
        else:
            if missing:
                arrivals.put_nowait((number, RuntimeError(f"{self._servers[number]} left {len(missing)} requests out")))

    def _completion(self, answer: Answer, asked_at: int) -> Completion:
        (found, tokens, logprobs, reason, versions), now = answer, self._version()
        if not versions and now != asked_at:
            raise RuntimeError(
                f"weights changed from {asked_at} to {now} while a request ran, and this release of the engine "
                "does not say which of them sampled which token"
            )
        each = [version for version, count in versions or () for _ in range(count)]
        first = each[0] if each else asked_at
        mixed = each if len(versions or ()) > 1 else None
        return Completion(found, tokens, logprobs, cast(Any, reason), first, mixed)

    def _look_after(self, silences: list[int], asked: dict[asyncio.Task[None], int]) -> None:
        """A server that has requests and does not answer any more is as good as gone."""
        for number in set(asked.values()):
            silences[number] = 0 if self._servers[number].answers() else silences[number] + 1
            if silences[number] == _MOST_SILENCES:
                self._log(f"{self._servers[number]} does not answer any more")
                for task in [task for task, place in asked.items() if place == number]:
                    task.cancel()
