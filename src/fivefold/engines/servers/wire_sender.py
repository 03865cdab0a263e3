"""Sends the policy's weights to servers on other devices: every sender broadcasts its part of each tensor.

A transfer is complete on all servers, or none of them has new weights: all participants wait for each other.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from fivefold.distributed.ranks import Ranks
from fivefold.engines.servers.buckets import BroadcastMemory, Bucket, BucketWriter, Memory, NoMemory, Part
from fivefold.engines.servers.http import own_address
from fivefold.engines.servers.server import Server, ServerLostError, Where
from fivefold.engines.servers.transfer import broadcast, join_groups, leave, open_store
from fivefold.engines.servers.weight_sender import Delivery
from fivefold.engines.weight_sync import crossed_off

MOST_SENDERS = 8
"""Most senders: a machine with eight GPUs has as many network cards. Each sender adds a group that includes every worker of
all servers."""
_POLL_SECONDS, _LOOK_SECONDS = 0.001, 0.2
"""Seconds between checks of pending work, and between checks whether another rank has given up."""
_OWN = -1
"""Key of this rank's own join among the numbers of servers."""
_REASON_SECONDS = 5.0
"""Seconds in which servers may report why they could not take weights."""


def senders_of(ranks: int) -> list[int]:
    """Returns the ranks that send, spread evenly over all. Each holds every tensor for a moment, gathered over the policy's
    layout."""
    count = min(ranks, MOST_SENDERS)
    return [index * ranks // count for index in range(count)]


class WireSender:
    """Delivers weights in buckets; each sender broadcasts its part of a bucket to the workers of all servers at once."""

    def __init__(
        self, ranks: Ranks, device: torch.device, bucket_bytes: int, servers_per_device: int = 1, *, is_staged: bool
    ) -> None:
        """`is_staged`: gather all weights before sending any; each sender then holds its part of the whole model at once.

        `servers_per_device`: so many servers with consecutive numbers share devices. With NCCL a device can be in a group
        only once, so the first servers of all devices are in groups of their own, and so are the second ones.
        """
        self._ranks, self._device, self._is_staged = ranks, device, is_staged
        self._servers_per_device = servers_per_device
        senders = senders_of(ranks.layout.world_size)
        self._senders, self._sends = len(senders), ranks.rank in senders
        self._index = senders.index(ranks.rank) if self._sends else 0
        self._writer = BucketWriter(bucket_bytes, self._allocate, Part(self._index, len(senders)))
        self._threads: dict[int, ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1))
        """One thread for each server, which takes the buckets in order."""
        self._store: Any = None
        self._where: Where = "", 0, 0.0
        self._groups: list[Any] = []
        self._joined: list[str] = []
        self._joins = 0
        self._servers: Mapping[int, Server] = {}
        self._asked: list[tuple[int, Future[Any]]] = []
        self._fault, self._is_cut = "", False

    def deliver(self, delivery: Delivery) -> tuple[list[str], set[int]]:
        """Delivers as `Sender.deliver` does. If one server is lost before all have everything, all of them are."""
        self._servers, self._asked, self._fault, self._is_cut = delivery.servers, [], "", False
        buckets = self._writer.buckets(crossed_off(delivery.weights, delivery.missing), keeps=self._is_staged)
        if self._is_staged:
            buckets = iter(list(buckets))
        self._join()
        self._is_cut = self._ranks.any(self._is_cut)
        if not self._is_cut:
            delivery.begin()
        self._settle(self._ask("begin_weights", delivery.verify))
        under_way: deque[tuple[dict[int, Future[Any]], list[Any]]] = deque()
        for bucket in buckets:
            # The other ranks gather the weights with this rank, whether it sends or not.
            if not self._is_cut:
                under_way.append(self._send(bucket))
                if len(under_way) > 1:
                    self._settle(*under_way.popleft())
        while under_way:
            self._settle(*under_way.popleft())
        is_given_up = self._ranks.any(self._is_cut)
        outcome = self._given_up() if is_given_up else self._finish(not delivery.missing, delivery.version)
        self._writer.close()
        return outcome

    def _finish(self, is_whole: bool, version: int) -> tuple[list[str], set[int]]:
        """Ends a complete transfer; returns what is wrong with it, and the servers that were lost meanwhile."""
        faults, lost = [], set()
        for number, call in self._ask("finish_weights", is_whole, version).items():
            try:
                faults += call.result()
            except ServerLostError:
                lost.add(number)
            except RuntimeError as error:
                faults.append(str(error))
        return faults, lost

    def _given_up(self) -> tuple[list[str], set[int]]:
        """Ends a failed transfer: all servers are lost, since workers may wait for data that is never sent and cannot be
        called.

        If a server is gone, that is the reason and there are no faults. Otherwise the fault is returned, and ends the run.
        """
        wait([call for _, call in self._asked], _REASON_SECONDS)
        errors = [call.exception() for _, call in self._asked if call.done()]
        self._leave()
        if self._ranks.any(any(isinstance(error, ServerLostError) for error in errors)):
            return [], set(self._servers)
        faults = [str(error) for error in errors if error is not None] or ([self._fault] if self._fault else [])
        return faults, set(self._servers)

    def _allocate(self, size: int) -> Memory:
        return BroadcastMemory(size, self._device) if self._sends else NoMemory(size)

    def _send(self, bucket: Bucket) -> tuple[dict[int, Future[Any]], list[Any]]:
        """Begin to send this rank's part, and let its servers receive all parts."""
        calls = self._ask("receive_bucket", [bucket.memory.handle], bucket.entries, bucket.used)
        return calls, [broadcast(group, bucket.memory.bytes_B[: bucket.used]) for group in self._groups]

    def _ask(self, name: str, *arguments: Any) -> dict[int, Future[Any]]:
        if self._is_cut:
            return {}
        calls = {number: self._submit(number, getattr(one, name), *arguments) for number, one in self._servers.items()}
        self._asked += calls.items()
        return calls

    def _submit(self, number: int, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._threads[number].submit(call, *arguments)

    def _settle(self, calls: Mapping[int, Future[Any]], works: Sequence[Any] = ()) -> list[Any]:
        """Waits for all calls and works; returns the answers, or an empty list if they cannot complete on some rank."""
        looked = time.monotonic()
        while not self._is_cut:
            waiting = [call for call in calls.values() if not call.done()]
            if any(call.done() and call.exception() is not None for call in calls.values()):
                self._cut()
            elif not waiting and all(self._is_done(work) for work in works):
                break
            elif time.monotonic() > looked + _LOOK_SECONDS:
                looked, self._is_cut = time.monotonic(), self._store.check([self._cut_key])
            elif waiting:
                wait(waiting, _POLL_SECONDS)
            else:
                time.sleep(_POLL_SECONDS)
        return [] if self._is_cut else [call.result() for call in calls.values()]

    def _is_done(self, work: Any) -> bool:
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            self._fault = str(error)
            self._cut()
        return True

    def _cut(self) -> None:
        """Give up, and signal that to the other ranks."""
        self._is_cut = True
        self._store.set(self._cut_key, "")

    @property
    def _cut_key(self) -> str:
        return f"cut-{self._joins}"

    def _join(self) -> None:
        """Join the workers of all servers, unless they are the same as last time. Collective."""
        addresses = [
            address
            for addresses_of_rank in self._ranks.gather_objects([one.address for one in self._servers.values()])
            for address in addresses_of_rank
        ]
        if addresses == self._joined:
            return
        self._leave()
        if self._store is None:
            self._open_store(addresses)
        self._joins += 1
        counts: dict[int, int] = {}
        for counts_of_rank in self._ranks.gather_objects(list(self._workers().items())):
            counts |= dict(counts_of_rank)
        if len(counts) < len(addresses):
            self._is_cut = True
            return
        sizes, firsts = [1] * self._servers_per_device, {}
        for number in sorted(counts):
            place = number % self._servers_per_device
            firsts[number] = sizes[place]
            sizes[place] += counts[number]
        names = [
            [f"weights-{self._joins}-{place}-{sender}" for sender in range(self._senders)] for place in range(len(sizes))
        ]
        calls = {}
        for number, server in self._servers.items():
            place = number % self._servers_per_device
            joins = self._where, names[place], firsts[number], sizes[place]
            calls[number] = self._submit(number, server.join_groups, *joins)
        self._asked += calls.items()
        if self._sends:
            # In a new thread each time: a partner that never joins would keep this rank from noticing the failure.
            names_here = [names_of_place[self._index] for names_of_place in names]
            calls[_OWN] = ThreadPoolExecutor(1).submit(self._join_own, names_here, sizes)
        self._settle(calls)
        if self._sends and calls[_OWN].done() and (error := calls[_OWN].exception()) is not None:
            self._fault = str(error)
        if not self._is_cut:
            self._groups, self._joined = calls[_OWN].result() if self._sends else [], addresses

    def _join_own(self, names: Sequence[str], sizes: Sequence[int]) -> list[Any]:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # A separate store connection: a store answers one request at a time, and this one takes until all members have
        # joined.
        store = open_store(*self._where)
        groups = [join_groups(store, [name], 0, size, self._device) for name, size in zip(names, sizes, strict=True)]
        return [group for (group,) in groups]

    def _open_store(self, addresses: Sequence[str]) -> None:
        """Open the store, which the first rank holds at an address that the workers of every server can reach."""
        if self._ranks.is_main:
            far = next((candidate for candidate in addresses if not candidate.startswith("unix:")), addresses[0])
            seconds = self._ranks.timeout.total_seconds()
            self._store = open_store(own_address(far), None, seconds)
            self._where = own_address(far), self._store.port, seconds
        address, port, seconds = self._ranks.broadcast_from_main(self._where)
        self._where = address, port, seconds
        if not self._ranks.is_main:
            self._store = open_store(*self._where)

    def _workers(self) -> dict[int, int]:
        """Returns the number of workers of each of this rank's servers."""
        calls = self._ask("workers")
        return dict(zip(calls, self._settle(calls), strict=False))

    def _leave(self) -> None:
        leave(self._groups)
        self._joined = []
