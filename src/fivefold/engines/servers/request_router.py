"""Distributes one rank's requests over servers by load, in a separate thread, so that callers continue meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import count, groupby
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from fivefold.engines.servers.begun import Begun
from fivefold.engines.servers.load_meter import LoadMeter
from fivefold.engines.servers.server import Answer, Server, ServerLostError
from fivefold.errors import RunError
from fivefold.interfaces import Load, Pressure
from fivefold.types import Completion, Request

_SILENCE, _MOST_SILENCES = 10.0, 6
"""Seconds without a completion after which servers are probed, and the number of failed probes after which they are given
up."""
_MOST_PROBES = 64
"""Servers that are probed at once."""
_LOOK_SECONDS = 0.5
"""Seconds between two readings of how full a server is, of one server after the other."""
_FULL = 0.9
"""Share of its cache from which on a server counts as full."""
_MOST_PLACES = 1 << 16
"""Trajectories whose server is remembered."""
T = TypeVar("T")


class Cancelled(Enum):
    """Why requests that a server has were cancelled."""

    LOST = auto()
    """The server was given up: another one gets the requests."""
    DROPPED = auto()
    """The caller no longer needs the responses."""


@dataclass
class _Sent:
    """Requests of one prompt that a server has."""

    number: int
    """Number of the server."""
    server: Server
    """The server itself: another one may have its number before it has answered."""
    stream: RequestStream
    requests: list[Request]
    cancelled: Cancelled | None = None


_Run = tuple["RequestStream", list[Request]]
"""Requests of one prompt that go to one server."""


class RequestStream:
    """Requests of one caller, and their completions as they arrive."""

    def __init__(self, router: RequestRouter) -> None:
        self._router, self.arrivals = router, SimpleQueue[Completion | Exception | None]()
        self._wanted: set[int] = set()

    @property
    def pending(self) -> int:
        """Number of requests whose completion was not taken yet."""
        return len(self._wanted)

    def submit(self, requests: Sequence[Request]) -> None:
        self._wanted.update(request.id for request in requests)
        self._router.call_soon(self._router.add, self, requests)

    def completions(self) -> Iterator[Completion]:
        """Yields a completion of each request, as they finish; if no server is left, the rest of them as lost."""
        while self._wanted:
            if (completion := self.take()) is not None:
                yield completion
                continue
            lost, self._wanted = self._wanted, set()
            yield from (Completion(number, [], [], "lost", self._router.version) for number in sorted(lost))

    def take(self, seconds: float | None = None) -> Completion | None:
        """Returns the next completion; None if none arrived in time or no server is left. Raises the error of a failed
        request."""
        while True:
            try:
                arrival = self.arrivals.get(timeout=seconds)
            except Empty:
                return None
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                return None
            if arrival.request_id in self._wanted:
                self._wanted.remove(arrival.request_id)
                return arrival

    def arrived(self, seconds: float) -> Iterator[Completion]:
        """Yields completions as they finish, for about this many seconds."""
        end = time.monotonic() + seconds
        while (completion := self.take(max(0.0, end - time.monotonic()))) is not None:
            yield completion

    def wake(self) -> None:
        """Let an `arrived` that waits return."""
        self.arrivals.put(None)

    def drop(self, request_ids: Collection[int]) -> None:
        """Cancel these requests: servers end them."""
        self._wanted.difference_update(request_ids)
        self._router.call_soon(self._router.forget, self)

    def close(self) -> None:
        """Cancel all requests that are still in flight."""
        self._wanted.clear()
        self._router.call(self._router.forget, self)

    def wants_any(self, requests: Sequence[Request]) -> bool:
        """Returns whether a completion of one of these requests is still to be taken."""
        return any(request.id in self._wanted for request in requests)

    def load(self) -> Load:
        """Returns the load of all streams since the previous call."""
        return self._router.meter.read()

    def pressure(self) -> Pressure | None:
        """Returns how close the servers are to their limits, a new object after each reading of all."""
        return self._router.pressure


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports the error of a callback, except where its future was cancelled just before."""
    # anyio lets a socket's news set the result of the request that waits for them, and nothing is lost if none does.
    future = getattr(getattr(context.get("handle"), "_callback", None), "__self__", None)
    if not (isinstance(context.get("exception"), asyncio.InvalidStateError) and _is_cancelled(future)):
        loop.default_exception_handler(context)


def _is_cancelled(future: object) -> bool:
    return isinstance(future, asyncio.Future) and future.cancelled()


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self._loop.run_forever()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call the function in the thread of the requests."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function in the thread of the requests, and return its result."""

        async def run() -> T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class _Sending(_LoopThread):
    """Sends requests to servers, in a thread of its own."""

    def __init__(self, rank: int, window: int, log: Callable[[str], None], stall_seconds: float) -> None:
        """`window`: most requests of this rank that a server has at once; `stall_seconds`: time in which a server that has
        requests must sample a token."""
        self._rank, self._window, self._log, self._stall_seconds = rank, window, log, stall_seconds
        self._numbers = count()
        self._later, self._first = deque[_Run](), deque[_Run]()
        """Requests that no server has: later turns of trajectories, and all others."""
        self._places, self._readings = _Places(), _Readings()
        self._sent: dict[asyncio.Task[None], _Sent] = {}
        self.servers: Sequence[Server] = ()
        self._loads: list[int] = []
        self._watched: list[_Watched] = []
        self._lost: set[int] = set()
        self._begun: dict[tuple[RequestStream, int], Begun] = {}
        self.version = 0
        """Version of the weights that sample now."""
        self._is_held, self._is_watching, self._keeps = True, True, False
        self.meter, self._probes = LoadMeter(), ThreadPoolExecutor(_MOST_PROBES)
        super().__init__("requests")
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._probes.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        watching = [self._loop.create_task(work) for work in (self._watch(), self._readings.follow(self))]
        self._loop.run_forever()
        self._is_held = True
        for task in watching:
            task.cancel()
        tasks = [*self._sent]
        self._cancel(tasks, Cancelled.DROPPED)
        self._loop.run_until_complete(asyncio.wait([*watching, *tasks]))

    def add(self, stream: RequestStream, requests: Sequence[Request]) -> None:
        # One server answers all requests of a prompt, so that the prompt is computed once.
        for _, run in groupby(requests, lambda one: (one.prompt_ids, one.sampling, one.turn > 0)):
            of_prompt = list(run)
            self._queue(of_prompt).append((stream, of_prompt))
        if self._lost and self._is_stranded:
            stream.arrivals.put(None)
        self.dispatch()

    def forget(self, stream: RequestStream) -> None:
        """End the requests of which the stream wants nothing any more."""
        for waiting in (self._later, self._first):
            wanted = [entry for entry in waiting if entry[0] is not stream or stream.wants_any(entry[1])]
            waiting.clear()
            waiting.extend(wanted)
        for key, begun in list(self._begun.items()):
            if key[0] is stream and not stream.wants_any([begun.request]):
                del self._begun[key]
        of_stream = [(task, sent.requests) for task, sent in self._sent.items() if sent.stream is stream]
        self._cancel([task for task, requests in of_stream if not stream.wants_any(requests)], Cancelled.DROPPED)

    def _cancel(self, tasks: Sequence[asyncio.Task[None]], why: Cancelled) -> None:
        for task in tasks:
            self._sent[task].cancelled = why
            task.cancel()

    @property
    def _is_stranded(self) -> bool:
        return len(self._lost) == len(self.servers)

    def _queue(self, run: list[Request]) -> deque[_Run]:
        return self._later if run[0].turn else self._first

    def has_turns_at(self, number: int) -> bool:
        """Returns whether a server is there while any has turns of trajectories."""
        is_there = number < len(self.servers) and number not in self._lost
        return is_there and any(sent.requests[0].trajectory is not None for sent in self._sent.values())

    def dispatch(self) -> None:
        """Send what waits to servers that may have more requests."""
        while (waiting := self._later or self._first) and not self._is_held:
            stream, run = waiting[0]
            if (number := self._server_of(stream, run[0])) is None:
                # All servers have as many requests as they may have.
                return
            waiting.popleft()
            if not self._loads[number]:
                self._watched[number].reset()
            self._count(number, len(run))
            sent = _Sent(number, self.servers[number], stream, run)
            task = self._loop.create_task(self._ask(sent))
            self._sent[task] = sent
            task.add_done_callback(self._ended)

    def _count(self, number: int, change: int) -> None:
        self._loads[number] += change
        self.meter.now(sum(self._loads))

    def _server_of(self, stream: RequestStream, request: Request) -> int | None:
        """Returns the server for a request, None if each has as many as it may have."""
        loads = self._loads
        free = [number for number, load in enumerate(loads) if load < self._window and number not in self._lost]
        roomy = [number for number in free if not self._readings.is_full(number)]
        number = self._places.get(stream, request)
        if number not in roomy:
            # The server with the fewest requests of this rank; ranks begin with different servers.
            number = min(roomy or free, key=partial(_order, loads, self._rank), default=None)
        if number is not None:
            self._places.put(stream, request, number)
        return number

    async def _ask(self, sent: _Sent) -> None:
        number, stream, run = sent.number, sent.stream, sent.requests
        missing = {request.id: request for request in run}
        name, first = f"{self._rank}-{next(self._numbers)}", run[0]
        draws, asked_at = [(request.id, request.seed) for request in run], self.version
        try:
            async for answer in sent.server.generate(name, first.prompt_ids, first.sampling, draws):
                completion = _completion(answer, asked_at, self.version)
                request = missing.pop(answer[0])
                self._watched[number].reset()
                self._count(number, -1)
                # A stop string may begin before the cut, and the rest would not show it: the caller samples it again.
                if self._keeps and completion.finish_reason == "abort" and not request.sampling.stop:
                    self._keep(stream, request, completion)
                else:
                    self._give(stream, completion)
                self.dispatch()
            if missing:
                raise RuntimeError(f"{sent.server} left {len(missing)} requests out")
        except (ServerLostError, asyncio.CancelledError):
            self._take_back(sent, list(missing.values()))
        except Exception as error:
            self._count(number, -len(missing))
            stream.arrivals.put(error)

    def _take_back(self, sent: _Sent, missing: list[Request]) -> None:
        """Take back the requests that their server will not answer; a server that has replaced it meanwhile is not lost."""
        self._count(sent.number, -len(missing))
        if sent.cancelled is not Cancelled.DROPPED:
            if missing:
                self._queue(missing).appendleft((sent.stream, missing))
            if sent.server in self.servers:
                self._lose({sent.number})
        self.dispatch()

    def _ended(self, task: asyncio.Task[None]) -> None:
        sent = self._sent.pop(task)
        if task.cancelled():
            # Only a task that was cancelled before it began does not catch this.
            self._take_back(sent, sent.requests)

    def _keep(self, stream: RequestStream, request: Request, completion: Completion) -> None:
        """Queue a request for the rest of a response, to be sent when there are new weights."""
        key = stream, request.id
        before = self._begun.get(key)
        begun = Begun(request, completion) if before is None else before.with_more(completion)
        if stream.wants_any([request]):
            self._begun[key] = begun
            rest = [begun.rest()]
            self._queue(rest).appendleft((stream, rest))

    def _give(self, stream: RequestStream, completion: Completion) -> None:
        begun = self._begun.pop((stream, completion.request_id), None)
        stream.arrivals.put(completion if begun is None else begun.with_more(completion).completion)

    def _lose(self, numbers: set[int]) -> None:
        before = self._is_stranded
        self._lost |= numbers
        if self._is_stranded and not before:
            askers = [
                *(stream for stream, _ in (*self._later, *self._first)),
                *(sent.stream for sent in self._sent.values()),
            ]
            for stream in dict.fromkeys(askers):
                stream.arrivals.put(None)

    async def _watch(self) -> None:
        """Gives up servers that have requests and do not answer, or sample nothing."""
        while True:
            await asyncio.sleep(_SILENCE / 2)
            # All at once: a probe of a process that is stopped, or of a host that is gone, waits for long.
            await asyncio.gather(*(self._probe(number, watched) for number, watched in enumerate(self._watched)))

    async def _probe(self, number: int, watched: _Watched) -> None:
        is_quiet = not self._loads[number] or number in self._lost
        if is_quiet or not self._is_watching or not watched.is_due():
            return
        tokens = await self._loop.run_in_executor(self._probes, self.servers[number].progress)
        if reason := watched.look(tokens, self._stall_seconds):
            self._log(f"{self.servers[number]} {reason}")
            tasks = [task for task, sent in self._sent.items() if sent.number == number]
            self._cancel(tasks, Cancelled.LOST)


class RequestRouter(_Sending):
    """Sends requests to servers, all of a prompt to the same one, and reassigns the requests of a server that ended.

    Later turns of a trajectory go before first ones, and to the server of the turn before, which has computed their context,
    unless that one has ended or is full.
    """

    def open(self) -> RequestStream:
        return RequestStream(self)

    def serve(self, servers: Sequence[Server]) -> None:
        """Use these servers from now on; a later call replaces those that were lost."""

        def change() -> None:
            if len(servers) != len(self.servers):
                self._loads, self._watched = [0] * len(servers), [_Watched() for _ in servers]
            self.servers = servers
            self._lost.clear()
            self.dispatch()

        self.call(change)

    @property
    def lost(self) -> set[int]:
        """Numbers of the servers that were found to be gone."""
        return self.call(lambda: set(self._lost))

    def lose(self, numbers: set[int]) -> None:
        """Mark servers as gone that another component found to be gone."""
        self.call(lambda: self._lose(numbers))

    def hold(self, keeps: bool = False) -> bool:
        """Send no new requests to servers until `go`; returns whether any server has requests.

        `keeps`: responses that servers end meanwhile are not returned to the caller; after `go` the missing part is
        requested. Responses with stop strings are returned as aborted.
        """

        def change() -> bool:
            self._is_held, self._keeps = True, keeps
            return any(self._loads)

        return self.call(change)

    def stop_watching(self) -> None:
        """Expect no server to sample until `go`."""

        def change() -> None:
            self._is_watching = False

        self.call(change)

    @property
    def is_idle(self) -> bool:
        """True if no server has a request."""
        return self.call(lambda: not any(self._loads))

    def go(self, version: int) -> None:
        """Resume sending requests; tokens sampled from now on have this weight version."""

        def change() -> None:
            self.version, self._is_held, self._is_watching, self._keeps = version, False, True, False
            for watched in self._watched:
                watched.reset()
            self.dispatch()

        self.call(change)

    def abort(self) -> None:
        """Return waiting requests as aborted, with the tokens they have so far; the servers end the requests that they
        have."""

        def change() -> None:
            for waiting in (self._later, self._first):
                for stream, run in waiting:
                    for request in run:
                        self._give(stream, Completion(request.id, [], [], "abort", self.version))
                waiting.clear()

        self.call(change)

    @property
    def pressure(self) -> Pressure | None:
        """How close the servers are to their limits."""
        return self._readings.total


class _Places:
    """The server that had the last turn of each trajectory."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[RequestStream, int | None], int] = OrderedDict()

    def get(self, stream: RequestStream, request: Request) -> int | None:
        return self._numbers.get((stream, request.trajectory))

    def put(self, stream: RequestStream, request: Request, number: int) -> None:
        if request.trajectory is None:
            return
        key = stream, request.trajectory
        self._numbers[key] = number
        self._numbers.move_to_end(key)
        if len(self._numbers) > _MOST_PLACES:
            self._numbers.popitem(last=False)


class _Readings:
    """How full each server is."""

    def __init__(self) -> None:
        self._of: dict[int, Pressure] = {}
        self.total: Pressure | None = None
        """All servers together, a new object after each reading of all."""

    def is_full(self, number: int) -> bool:
        reading = self._of.get(number)
        return reading is not None and reading.kv_used > _FULL

    async def follow(self, router: _Sending) -> None:
        """Reads how full the servers are, one after the other, while they have turns of trajectories."""
        while True:
            for number in range(max(1, len(router.servers))):
                await asyncio.sleep(_LOOK_SECONDS)
                if not router.has_turns_at(number):
                    self._of.pop(number, None)
                elif reading := await asyncio.to_thread(router.servers[number].pressure):
                    self._of[number] = reading
            self._add_up()
            router.dispatch()

    def _add_up(self) -> None:
        if readings := self._of.values():
            self.total = Pressure(
                max(reading.kv_used for reading in readings),
                sum(reading.queued for reading in readings),
                sum(reading.prefix_tokens for reading in readings),
                sum(reading.prefix_hits for reading in readings),
            )


def _order(loads: Sequence[int], rank: int, number: int) -> tuple[int, int]:
    """Returns the order in which servers are taken."""
    return loads[number], (number - rank) % len(loads)


def _completion(answer: Answer, asked_at: int, now: int) -> Completion:
    """Returns the completion of an answer; the weights had these versions when it was requested, and when it came."""
    request_id, tokens, logprobs, reason, versions, routes = answer
    if not versions and now != asked_at:
        raise RunError(
            f"weights changed from {asked_at} to {now} while a request ran, and this release of the engine "
            "does not say which of them sampled which token"
        )
    per_token = [version for version, count in versions or () for _ in range(count)]
    first = per_token[0] if per_token else asked_at
    mixed = per_token if len(versions or ()) > 1 else None
    return Completion(request_id, tokens, logprobs, cast(Any, reason), first, mixed, routes)


class _Watched:
    """State of a server that returns no completion."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restart the measurement: the server has just returned a completion or received a request."""
        self._looked = self._moved = time.monotonic()
        self._tokens: float | None = None
        self._silences = 0

    def is_due(self) -> bool:
        return time.monotonic() - self._looked >= _SILENCE

    def look(self, tokens: float | None, stall_seconds: float) -> str | None:
        """Returns why the server must be given up, or None; `tokens`: sampled so far, None if it did not answer."""
        self._looked = time.monotonic()
        if tokens is None:
            self._silences += 1
            return "does not answer any more" if self._silences == _MOST_SILENCES else None
        self._silences = 0
        if tokens != self._tokens:
            self._tokens, self._moved = tokens, self._looked
            return None
        silent = self._looked - self._moved
        return f"has sampled no token for {silent:.0f} s" if silent >= stall_seconds else None
