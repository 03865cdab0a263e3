"""Trajectories of a rank side by side: their turns go to an engine's stream, and their environments answer meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Generator as Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from fivefold.interfaces import Engine, EngineState, Load, Pressure
from fivefold.rollout.trajectories import Part, Task, Trajectory
from fivefold.types import Completion, Request, Sampling

Waiting = Request | Future[Any]
Steps = Coroutine[Waiting, Any, None]
"""A trajectory as it runs: yields what it waits for, a request to the engine or a future, and is sent the result."""
Key = tuple[int, int]
"""Place of the prompt, and number within its group."""
_IDLE_SECONDS = 1.0
"""Longest time that a driver in the background waits for something to happen."""
_STATE_SECONDS = 20.0
"""Longest time that a checkpoint waits for the states of environments."""
_FULL = 0.85
"""Share of a server's cache in use from which on fewer requests are in flight; above it, servers would drop what they have
computed."""
_LESS, _MORE = 0.8, 1.1
"""Factors on the number of requests in flight after servers were full, and while they are clear."""


class Conversing(Protocol):
    """Environment or agent layer that takes trajectories to their ends."""

    most: int
    """Maximum number of trajectories of a rank that run at once."""

    def steps(self, held: Trajectory, sampling: Sampling, driver: Driver) -> Steps:
        """Take a trajectory to its end, from where it is."""
        ...

    def state_of(self, held: Trajectory) -> Future[dict[str, Any] | None] | None:
        """Return the state of the environment of a trajectory that waits for the engine, for a checkpoint; None if it has
        none."""
        ...


@dataclass(eq=False)
class _Run:
    """A trajectory and what takes it to its end."""

    held: Trajectory
    sampling: Sampling
    number: int
    """Position among all trajectories of the driver."""
    steps: Steps | None = None
    """Coroutine of the trajectory; None until it starts."""
    requests: set[int] = field(default_factory=set)
    """Ids of the trajectory's requests in flight."""
    is_over: bool = False


@dataclass(frozen=True)
class _OpenRequest:
    """A request in flight, and what gets its completion: a future, or the trajectory itself."""

    run: _Run
    request: Request
    future: Future[Completion] | None = None


class _Queue:
    """Requests that wait until fewer are in flight, oldest trajectory first."""

    def __init__(self, most: int) -> None:
        self._most, self.limit = most, float(most)
        self.parked: list[tuple[int, int, Request]] = []
        self._pressure: Pressure | None = None

    def exchange(self, new: Sequence[Request], unanswered: int) -> list[Request]:
        """Add requests and return those to submit now; `unanswered`: number of all requests without a completion."""
        for request in new:
            heappush(self.parked, (request.trajectory or 0, request.id, request))
        requests = []
        while self.parked and unanswered - len(self.parked) < self.limit:
            requests.append(heappop(self.parked)[2])
        return requests

    def drop(self, request_ids: Collection[int]) -> None:
        self.parked = [entry for entry in self.parked if entry[1] not in request_ids]
        heapify(self.parked)

    def adapt(self, pressure: Pressure | None, unanswered: int) -> None:
        """Let fewer requests be in flight where servers are nearly full or requests queue there, and more while they are
        clear."""
        if pressure is None or pressure is self._pressure:
            return
        self._pressure = pressure
        if pressure.kv_used > _FULL or pressure.queued:
            self.limit = max(1.0, _LESS * min(self.limit, unanswered - len(self.parked)))
        elif self.parked:
            self.limit = min(float(self._most), _MORE * self.limit + 1.0)


class _Runs:
    """Trajectories that have not ended, and what each of them waits for."""

    def __init__(
        self,
        engine: Engine,
        conversations: Conversing,
        check_start: Callable[[Trajectory, Trajectory], None] | None = None,
    ) -> None:
        """`check_start`: is called with a trajectory and the first one of its group, once both have a first context."""
        self._engine, self._stream, self._conversations = engine, engine.stream(), conversations
        self._check_start = check_start
        # An engine in the rank samples one batch at a time, and nothing else happens meanwhile.
        self.blocks = self._stream.load() is None
        """Whether the engine samples only within `advance`."""
        self._lock = threading.RLock()
        self._ids, self._numbers = count(), count()
        self._runs: dict[Key, _Run] = {}
        """All trajectories that have not ended, in the order in which they were added."""
        self._held: deque[_Run] = deque()
        """Trajectories that wait until a running one ends."""
        self._running = 0
        self._busy: set[_Run] = set()
        """Trajectories that run without a request in flight: their environments answer."""
        self._new: list[Request] = []
        self._requests: dict[int, _OpenRequest] = {}
        self._answers: SimpleQueue[tuple[_Run, Future[Any]] | None] = SimpleQueue()
        """Futures that are done; None wakes a thread that waits for them."""
        self._is_woken = self._is_interrupted = False
        self._members: Counter[int] = Counter()
        """Place of a group -> number of its trajectories that have not ended."""
        self._started: dict[int, Trajectory] = {}
        """Place of a group -> its first trajectory with a context."""
        self._ended: list[Trajectory] = []
        self._queue = _Queue(conversations.most)
        self._thread: threading.Thread | None = None
        self._has_news = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return bool(self._runs)

    def _wake(self) -> None:
        """Let a thread that waits in `advance` look at what is new; may be called by any thread."""
        if not self._is_woken:
            self._is_woken = True
            if self.blocks:
                self._answers.put(None)
            else:
                self._stream.wake()

    def _arrived(self, completion: Completion) -> None:
        with self._lock:
            if (pending := self._requests.get(completion.request_id)) is None:
                return
            run = pending.run
            if completion.finish_reason in ("abort", "lost"):
                # The same key draws the same numbers again, with the weights of then.
                run.held.count("turns/aborted_tokens", len(completion.token_ids))
                self._new.append(pending.request)
                self._is_interrupted = True
                return
            del self._requests[completion.request_id]
            run.requests.remove(completion.request_id)
            if not run.requests:
                run.held.clock.run()
                self._busy.add(run)
            if pending.future is not None:
                pending.future.set_result(completion)
            else:
                self._resume(run, completion)

    def _answered(self, run: _Run, future: Future[Any]) -> None:
        with self._lock:
            if not run.is_over:
                error = future.exception()
                self._resume(run, None if error else future.result(), error)

    def _resume(self, run: _Run, result: Any, error: BaseException | None = None) -> None:
        """Send a trajectory what it waited for, and begin what it waits for next."""
        assert run.steps is not None
        try:
            waiting = run.steps.send(result) if error is None else run.steps.throw(error)
        except StopIteration:
            self._end(run)
            self._ended.append(run.held)
            self._has_news.set()
            return
        if isinstance(waiting, Request):
            self._request(run, waiting)
            return

        def answered(future: Future[Any]) -> None:
            self._answers.put((run, future))
            self._wake()

        waiting.add_done_callback(answered)

    def _request(self, run: _Run, request: Request, future: Future[Completion] | None = None) -> None:
        if self._check_start is not None and not run.held.turns:
            self._check_start(run.held, self._started.setdefault(run.held.task.place, run.held))
        # A trajectory of an agent counts its turns at its end: its requests have their numbers.
        turn = run.held.turns if future is None else request.turn
        request = replace(request, id=next(self._ids), trajectory=run.number, turn=turn)
        self._requests[request.id] = _OpenRequest(run, request, future)
        run.requests.add(request.id)
        run.held.clock.hold()
        self._busy.discard(run)
        self._new.append(request)

    def _end(self, run: _Run) -> None:
        """Forget a trajectory that has ended or was given up."""
        place, run.is_over = run.held.task.place, True
        del self._runs[run.held.task.key]
        self._running -= run.steps is not None
        self._busy.discard(run)
        for number in run.requests:
            pending = self._requests.pop(number)
            if pending.future is not None:
                pending.future.cancel()
        if run.requests:
            self._new = [request for request in self._new if request.id not in run.requests]
            self._queue.drop(run.requests)
            self._stream.drop(run.requests)
        self._members[place] -= 1
        if not self._members[place]:
            del self._members[place]
            self._started.pop(place, None)


class Driver(_Runs):
    """Takes trajectories to their ends; they may be added at any time.

    At most `most` of them run at once, and the ones added first come first. The time limit of a trajectory is held while one
    of its requests is in flight.
    """

    def start(self) -> None:
        """Continue the trajectories in the background, if the engine samples there; `advance` then only waits."""
        if not self.blocks:
            self._thread = threading.Thread(target=self._work, name="trajectories", daemon=True)
            self._thread.start()

    def add(self, tasks: Sequence[Task], sampling: Sampling) -> None:
        """Begin these trajectories, or let them wait for others to end."""
        self.resume([Trajectory(task) for task in tasks], sampling)

    def resume(self, trajectories: Sequence[Trajectory], sampling: Sampling) -> None:
        """Continue trajectories of a checkpoint."""
        with self._lock:
            for held in trajectories:
                run = self._runs[held.task.key] = _Run(held, sampling, next(self._numbers))
                self._members[held.task.place] += 1
                self._held.append(run)
        self._wake()

    def ask(self, held: Trajectory, request: Request) -> Future[Completion]:
        """Request a turn of a trajectory for a component that gets its turns from elsewhere; the id is replaced."""
        future: Future[Completion] = Future()
        with self._lock:
            self._request(self._runs[held.task.key], request, future)
        self._wake()
        return future

    def advance(self, seconds: float) -> list[Trajectory]:
        """Continue the trajectories for about so many seconds, and return those that have ended.

        In the background, they continue anyway; this returns when one of them has ended.
        """
        end = time.monotonic() + seconds
        if self._thread is not None:
            self._has_news.wait(seconds)
        while self._thread is None and self._runs and self._engine.state is EngineState.READY:
            self._begin()
            left = max(0.0, end - time.monotonic())
            (self._sample_batch if self.blocks else self._sample)(left)
            if not left or self._is_interrupted:
                break
        with self._lock:
            self._is_interrupted = False
            self._has_news.clear()
            if self._error is not None:
                raise self._error
            ended, self._ended = self._ended, []
        return ended

    def discard(self, keys: Collection[Key]) -> list[Trajectory]:
        """Give up trajectories with everything that was sampled for them, and return them."""
        given_up = []
        with self._lock:
            gone = set(keys)
            given_up += [held for held in self._ended if held.task.key in gone]
            self._ended = [held for held in self._ended if held.task.key not in gone]
            for run in [self._runs[key] for key in keys if key in self._runs]:
                if run.steps is None:
                    self._held.remove(run)
                else:
                    run.steps.close()
                self._end(run)
                given_up.append(run.held)
        return given_up

    def unfinished(self) -> list[Trajectory]:
        """Return the trajectories that have not ended, in the order in which they were added."""
        return [run.held for run in self._runs.values()]

    def parts(self) -> list[Part]:
        """Return copies of all trajectories that have sampled a turn, for a checkpoint.

        An environment whose trajectory waits for the engine stands still and returns its state.
        """
        with self._lock:
            begun = [run for run in self._runs.values() if run.held.turns]
            states = {run: self._conversations.state_of(run.held) for run in begun if run.requests}
            wait([state for state in states.values() if state is not None], _STATE_SECONDS)
            parts = [Part(*held.task.key, held.samples()) for held in self._ended]
            for run in begun:
                state = states.get(run)
                is_known = state is not None and state.done() and state.exception() is None
                parts.append(run.held.part(state.result() if state is not None and is_known else run.held.restore))
        return parts

    def load(self) -> Load | None:
        """Return the engine's load since the previous call."""
        return self._stream.load()

    def pressure(self) -> Pressure | None:
        """Return how close the engine's servers are to their limits."""
        return self._stream.pressure()

    def _work(self) -> None:
        """Continue the trajectories until the process ends."""
        try:
            while True:
                self._begin()
                self._sample(_IDLE_SECONDS)
        except BaseException as error:
            # It ends the run where the rank looks for trajectories next.
            self._error = error
            self._has_news.set()

    def _begin(self) -> None:
        """Begin trajectories that wait, up to the most that run at once."""
        with self._lock:
            while self._held and self._running < self._conversations.most and not self._queue.parked:
                run = self._held.popleft()
                run.steps = self._conversations.steps(run.held, run.sampling, self)
                self._running += 1
                self._busy.add(run)
                self._resume(run, None)

    def _sample(self, seconds: float) -> None:
        """Take what an engine that samples in the background returns, and what environments answer meanwhile."""
        self._queue.adapt(self._stream.pressure(), len(self._requests))
        self._take()
        if self._thread is None and not self._runs:
            return
        for completion in self._stream.arrived(seconds):
            self._arrived(completion)
            self._take()
            self._begin()
            if self._thread is None and not self._runs:
                return

    def _sample_batch(self, seconds: float) -> None:
        """Let an engine sample the turns of all trajectories once each environment has answered.

        The larger a batch of an engine that blocks, the better; and it does not depend on who answers first.
        """
        end = time.monotonic() + seconds
        while self._busy:
            try:
                answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                return
            self._is_woken = False
            if answer is not None:
                self._answered(*answer)
        with self._lock:
            requests, self._new = sorted(self._new, key=lambda request: (request.trajectory, request.id)), []
        self._stream.submit(requests)
        for completion in self._stream.arrived(0.0):
            self._arrived(completion)

    def _take(self) -> None:
        """Continue with the answers that are there, and submit the turns that follow."""
        self._is_woken = False
        while not self._answers.empty():
            if (answer := self._answers.get()) is not None:
                self._answered(*answer)
        with self._lock:
            new, self._new = self._new, []
            requests = self._queue.exchange(new, len(self._requests))
        if requests:
            self._stream.submit(requests)


class Usage:
    """How an engine was used while a driver ran."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._since, self._before = driver, time.monotonic(), driver.pressure()
        # What was before is not counted.
        driver.load()

    def count(self, counts: Counter[str], load: Load | None = None) -> None:
        """Add the seconds since the last call and what the engine did in them; `load`: its load, if it was read already."""
        now, pressure = time.monotonic(), self._driver.pressure()
        counts["environment/elapsed"] += now - self._since  # type: ignore[assignment]
        self._since = now
        if (load := load or self._driver.load()) is not None:
            counts["engine/idle"] += load.idle_seconds  # type: ignore[assignment]
            counts["engine/seconds"] += load.seconds  # type: ignore[assignment]
        if pressure is not None and self._before is not None:
            counts["engine/prefix_tokens"] += pressure.prefix_tokens - self._before.prefix_tokens  # type: ignore[assignment]
            counts["engine/prefix_hits"] += pressure.prefix_hits - self._before.prefix_hits  # type: ignore[assignment]
        self._before = pressure or self._before
