"""An engine of servers: requests spread by load, weights in buckets, and a server that ends is started again."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, groupby
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.ports import free_port
from fivefold.distributed.ranks import Ranks
from fivefold.engines.buckets import Bucket, DeviceMemory, HostMemory, Mailroom, Memory, WireMemory, broadcast, join_wire
from fivefold.engines.server import Answer, Server, ServerLostError
from fivefold.engines.server_process import ServerProcess
from fivefold.interfaces import EngineReplica
from fivefold.models.families import load_spec, parameters_of
from fivefold.types import Completion, Request

MOST_RESTARTS = 3
"""Times in a row that servers are started again, before the run ends."""
_SILENCE, _MOST_SILENCES = 10.0, 6
"""Seconds without a completion after which servers are asked whether they are still there, and how often in vain."""
Arrival = tuple[int, Completion | list[Request] | Exception]
"""Number of a server, and what it sampled, what it had when it was lost, or another error."""


class ServerEngine:
    """Servers behind one engine. Every rank sends its own part of the requests, to whichever server has least of them."""

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        device: torch.device,
        connect: Callable[[str], Server],
        log: Callable[[str], None],
        *,
        process: ServerProcess | None = None,
        ranks_per_server: int = 1,
        addresses: Sequence[str] = (),
        window: int,
        bucket_bytes: int,
        verify_every: int,
        can_sleep: bool,
    ) -> None:
        """Servers on the policy's ranks, or those that are there already at `addresses`.

        `process`: the server that this rank starts, the first of `ranks_per_server` ranks whose weights it gets;
        `window`: most requests of this rank that a server has at once.
        """
        self._ranks, self._device, self._process, self._connect, self._log = ranks, device, process, connect, log
        self._window, self._verify_every, self._can_sleep = window, verify_every, can_sleep
        self._given = list(addresses)
        self._ranks_per_server = ranks_per_server
        self._group = None if addresses else ranks.consecutive(ranks_per_server)
        self._sends = not addresses or ranks.is_main
        self._mailroom = Mailroom(bucket_bytes, self._allocate)
        self._wire: Any = None
        self._expected = [name for parameter in parameters_of(load_spec(directory)) for name in parameter.hf]
        self._servers: list[Server] = []
        self._lost: set[int] = set()
        self._restarts = self._updates = 0
        self._is_asleep = self._is_cache_asleep = self._is_generating = False
        self._loop = asyncio.new_event_loop()
        self._calls = ThreadPoolExecutor()
        self._numbers = count()
        self._waiting: deque[list[Request]] = deque()
        self._aborted: list[Request] = []
        self.replica = EngineReplica(ranks.rank, ranks.layout.world_size)
        self.version = -1
        self._start()
        if self._given and self._sends:
            self._open_wire()

    # --- servers -----------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> list[int]:
        """The servers that this rank speaks with about weights and memory."""
        if self._given:
            return list(range(len(self._servers))) if self._sends else []
        return [] if self._process is None else [self._ranks.rank // self._ranks_per_server]

    def _start(self) -> None:
        """Start what has ended, and know where every server is."""
        fault = ""
        if self._process is not None and self._process.has_ended:
            try:
                self._process.start()
                self._process.wait()
            except RuntimeError as error:
                fault = str(error)
        for each in self._ranks.gather_objects(fault):
            if each:
                raise RuntimeError(each)
        found = self._given or self._ranks.gather_objects("" if self._process is None else self._process.address)
        addresses, before = [address for address in found if address], {server.address: server for server in self._servers}
        self._servers = [before[address] if address in before else self._connect(address) for address in addresses]
        self._lost.clear()

    def _restart(self) -> None:
        """Start the servers again that were lost."""
        self._restarts += 1
        mine = self._process is not None and self._own[0] in self._lost
        tail = self._process.last_words() if mine and self._process is not None else ""
        tails = [each for each in self._ranks.gather_objects(tail) if each]
        if self._given or self._restarts > MOST_RESTARTS:
            names = ", ".join(str(self._servers[number]) for number in sorted(self._lost))
            raise RuntimeError("\n".join([f"the engine's servers ended {self._restarts} times: {names}", *tails]))
        self._log(f"{len(self._lost)} of {len(self._servers)} servers of the engine ended and are started again")
        if mine and self._process is not None:
            self._process.end()
        self._start()

    def _open_wire(self) -> None:
        """Join the servers' workers in one group, over which weights go to them."""
        counts = [server.workers() for server in self._servers]
        firsts = [1 + sum(counts[:place]) for place in range(len(counts))]
        here, port = _own_address(self._servers[0].address), free_port()
        joins = [
            self._calls.submit(server.open_wire, here, port, first, 1 + sum(counts))
            for server, first in zip(self._servers, firsts, strict=True)
        ]
        self._wire = join_wire(here, port, 0, 1 + sum(counts), self._device)
        for join in joins:
            join.result()

    def close(self) -> None:
        """End the servers that this engine has started."""
        if self._process is not None:
            self._process.close()

    # --- weights -----------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Send full tensors, of which each worker keeps its slices; raises RuntimeError where it holds something else.

        In the middle of `generate` requests wait meanwhile, and go on with the new weights. Where a server ends, the version
        stays below 0, and `wake` starts it again.
        """
        if self._is_generating:
            self._each("pause")
        self.version = -1
        verify = self._verify_every > 0 and self._updates % self._verify_every == 0
        missing, faults = set(self._expected), []
        coming = _crossed_off(weights, missing)
        self._settle(self._ask_own("begin_weights", verify))
        try:
            self._send(coming)
        finally:
            faults = self._settle(self._ask_own("finish_weights", not missing, version))
            self._mailroom.close()
        if missing:
            faults = [[f"{len(missing)} of {len(self._expected)} tensors did not come, the first: {sorted(missing)[:3]}"]]
        if found := [fault for rank in self._ranks.gather_objects(faults) for each in rank for fault in each]:
            said = "; ".join(found)
            raise RuntimeError(f"the engine's weights are not those of the policy after {version} updates: {said}")
        self._agree()
        if not self._lost:
            self._updates += 1
            self.version = version
        if self._is_generating:
            self._each("resume")

    def _send(self, coming: Iterator[tuple[str, Tensor]]) -> None:
        """Fill one bucket while the servers read the other."""
        under_way: deque[list[Future[Any]]] = deque()
        for bucket in self._mailroom.buckets(coming) if self._sends else _drained(coming):
            handles = self._handles(bucket)
            under_way.append(self._ask_own("receive_bucket", handles, bucket.entries, bucket.used))
            if self._wire is not None:
                self._hand_over(bucket, under_way[-1])
            if len(under_way) > 1:
                self._settle(under_way.popleft())
            # The next bucket is filled into the memory of the one before.
            self._meet()
        while under_way:
            self._settle(under_way.popleft())
        self._meet()

    def _allocate(self, size: int) -> Memory:
        if self._given:
            return WireMemory(size, self._device)
        return DeviceMemory(size, self._device) if self._device.type == "cuda" else HostMemory(size)

    def _handles(self, bucket: Bucket) -> list[dict[str, Any]]:
        """Of every rank that a server's weights come from, when all have filled theirs."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self._group is None:
            return [bucket.memory.handle]
        handles: list[Any] = [None] * self._group.size()
        dist.all_gather_object(handles, bucket.memory.handle, group=self._group)
        return handles

    def _meet(self) -> None:
        """Wait until the first of the ranks that a server's weights come from knows what has been read."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def _hand_over(self, bucket: Bucket, asked: list[Future[Any]]) -> None:
        """Broadcast a bucket to the workers that were asked to take it; raises at once where one of them cannot."""
        sent = self._calls.submit(broadcast, self._wire, bucket.memory.bytes_B[: bucket.used])
        waiting = {sent, *asked}
        while not sent.done():
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in done:
                try:
                    each.result()
                except ServerLostError as error:
                    raise RuntimeError(f"a server of engine.url ended while it took weights: {error}") from error

    def _ask_own(self, name: str, *arguments: Any) -> list[Future[Any]]:
        return [self._calls.submit(getattr(self._servers[number], name), *arguments) for number in self._own]

    def _settle(self, calls: Sequence[Future[Any]]) -> list[Any]:
        """The answers of this rank's servers; one that is gone is remembered."""
        answers = []
        for number, call in zip(self._own, calls, strict=True):
            try:
                answers.append(call.result())
            except ServerLostError:
                self._lost.add(number)
        return answers

    # --- memory ------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        if self._can_sleep and not self._is_asleep:
            self._each("sleep")
            self._is_asleep = self._is_cache_asleep = True
            self.version = -1

    def wake(self) -> None:
        if self._lost:
            self._restart()
        if self._is_asleep:
            self._each("wake", "weights")
            self._is_asleep = False

    def _wake_cache(self) -> None:
        if self._is_cache_asleep:
            self._each("wake", "kv_cache")
            self._is_cache_asleep = False

    def _each(self, name: str, *arguments: Any) -> None:
        """Ask every server, each by the rank that speaks with it; return on all ranks when all have answered."""
        if self._device.type == "cuda":
            # A server takes memory from the driver: what the trainer has freed must be back there, not in torch's cache.
            torch.cuda.empty_cache()
        self._ranks.barrier()
        for number in self._own:
            try:
                getattr(self._servers[number], name)(*arguments)
            except ServerLostError:
                self._lost.add(number)
        self._agree()

    def _agree(self) -> None:
        """Every rank knows of the servers that any rank has lost."""
        rows = torch.tensor(sorted(self._lost), dtype=torch.long)
        self._lost = set(torch.cat(self._ranks.all_gather_world(rows)).tolist())

    # --- requests ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """A completion of each request, as they finish. Collective.

        What a server had when it ended goes to the others. Where none is left, what is missing is to be asked for again
        after new weights: the version is below 0 then.
        """
        assert self.version >= 0, "the engine has no weights yet"
        self._wake_cache()
        before = len(self._lost)
        # One server answers all requests of a prompt: it computes the prompt once.
        self._waiting = deque(list(run) for _, run in groupby(requests, lambda one: (one.prompt_ids, one.sampling)))
        self._aborted = []
        self._is_generating = True
        try:
            yield from self._completions()
        finally:
            self._is_generating = False
        self._agree()
        if len(self._lost) == len(self._servers):
            self.version = -1
        elif len(self._lost) == before:
            self._restarts = 0

    def abort(self) -> None:
        """End the requests in flight: `generate` gives what they have so far."""
        self._aborted += [request for run in self._waiting for request in run]
        self._waiting.clear()
        for number in self._own:
            if number not in self._lost:
                self._servers[number].abort()

    def _completions(self) -> Iterator[Completion]:
        arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        loads, silences = [0] * len(self._servers), [0] * len(self._servers)
        asked: dict[asyncio.Task[None], int] = {}
        try:
            while self._waiting or self._aborted or any(loads):
                while self._aborted:
                    yield Completion(self._aborted.pop().id, [], [], "abort", self.version)
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
                    self._waiting.appendleft(what)
        finally:
            # Whoever asked may have gone away: servers end what nobody waits for.
            left = list(asked)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))

    def _freest(self, loads: Sequence[int]) -> int | None:
        """The server with the fewest requests of this rank; ranks begin with different ones."""
        free = [number for number, load in enumerate(loads) if load < self._window and number not in self._lost]
        return min(free, key=lambda number: (loads[number], (number - self._ranks.rank) % len(loads)), default=None)

    async def _ask(self, number: int, run: list[Request], arrivals: asyncio.Queue[Arrival]) -> None:
        missing = {request.id: request for request in run}
        name, first = f"{self._ranks.rank}-{next(self._numbers)}", run[0]
        draws, asked_at = [(request.id, request.seed) for request in run], self.version
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
        found, tokens, logprobs, reason, versions = answer
        if not versions and self.version != asked_at:
            raise RuntimeError(
                f"weights changed from {asked_at} to {self.version} while a request ran, and this release of the engine "
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


def _crossed_off(weights: Iterator[tuple[str, Tensor]], missing: set[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        missing.discard(name)
        yield name, tensor


def _drained(weights: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Take part in gathering the weights, and send nothing."""
    for _ in weights:
        pass
    yield from ()


def _own_address(other: str) -> str:
    """This machine's, as a server at `other` reaches it."""
    url = urlsplit(other)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname, url.port or 80))
        return str(probe.getsockname()[0])
