"""The policy's weights on their way to servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.ports import free_port
from fivefold.distributed.ranks import Ranks
from fivefold.engines.servers.buckets import (
    BroadcastMemory,
    Bucket,
    BucketWriter,
    DeviceMemory,
    HostMemory,
    Memory,
    broadcast,
    join_transfer_group,
)
from fivefold.engines.servers.http import own_address
from fivefold.engines.servers.server import Server, ServerLostError
from fivefold.engines.weight_sync import crossed_off


class WeightSender:
    """Delivers weights in buckets: to servers on this rank's devices in memory that they map, to others over a group."""

    def __init__(self, ranks: Ranks, device: torch.device, ranks_per_server: int | None, bucket_bytes: int) -> None:
        """`ranks_per_server`: ranks that the weights of one server come from; None for servers elsewhere, which get them
        from the first rank."""
        self._device, self._is_remote = device, ranks_per_server is None
        self._sends = ranks_per_server is not None or ranks.is_main
        self._group = None if ranks_per_server is None else ranks.consecutive(ranks_per_server)
        self._writer = BucketWriter(bucket_bytes, self._allocate)
        self._calls = ThreadPoolExecutor()
        self._transfer_group: Any = None
        self._servers: Mapping[int, Server] = {}
        self._lost: set[int] = set()

    def deliver(
        self,
        servers: Mapping[int, Server],
        weights: Iterator[tuple[str, Tensor]],
        missing: set[str],
        verify: bool,
        version: int,
    ) -> tuple[list[str], set[int]]:
        """What is wrong with what this rank's `servers`, by number, have then, and which of them are gone.

        Names are taken out of `missing` as they come. Called on all ranks.
        """
        if self._is_remote and self._sends and self._transfer_group is None:
            self._join_servers(list(servers.values()))
        self._servers, self._lost = servers, set()
        coming = crossed_off(weights, missing)
        self._settle(self._ask("begin_weights", verify))
        try:
            self._send(coming)
        finally:
            faults = self._settle(self._ask("finish_weights", not missing, version))
            self._writer.close()
        return [fault for each in faults for fault in each], self._lost

    def _send(self, coming: Iterator[tuple[str, Tensor]]) -> None:
        """Fill one bucket while the servers read the other."""
        under_way: deque[list[Future[Any]]] = deque()
        for bucket in self._writer.buckets(coming) if self._sends else _drained(coming):
            handles = self._handles(bucket)
            under_way.append(self._ask("receive_bucket", handles, bucket.entries, bucket.used))
            if self._transfer_group is not None:
                self._broadcast(bucket, under_way[-1])
            if len(under_way) > 1:
                self._settle(under_way.popleft())
            # The next bucket is filled into the memory of the one before.
            self._meet()
        while under_way:
            self._settle(under_way.popleft())
        self._meet()

    def _allocate(self, size: int) -> Memory:
        if self._is_remote:
            return BroadcastMemory(size, self._device)
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

    def _broadcast(self, bucket: Bucket, asked: list[Future[Any]]) -> None:
        """Broadcast a bucket to the workers that were asked to take it; raises at once where one of them cannot."""
        sent = self._calls.submit(broadcast, self._transfer_group, bucket.memory.bytes_B[: bucket.used])
        waiting = {sent, *asked}
        while not sent.done():
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in done:
                try:
                    each.result()
                except ServerLostError as error:
                    raise RuntimeError(f"a server of engine.url ended while it took weights: {error}") from error

    def _ask(self, name: str, *arguments: Any) -> list[Future[Any]]:
        return [self._calls.submit(getattr(server, name), *arguments) for server in self._servers.values()]

    def _settle(self, calls: Sequence[Future[Any]]) -> list[Any]:
        """The answers of this rank's servers; one that is gone is remembered."""
        answers = []
        for number, call in zip(self._servers, calls, strict=True):
            try:
                answers.append(call.result())
            except ServerLostError:
                self._lost.add(number)
        return answers

    def _join_servers(self, servers: Sequence[Server]) -> None:
        """Join the servers' workers in one group, over which weights go to them."""
        counts = [server.workers() for server in servers]
        firsts = [1 + sum(counts[:place]) for place in range(len(counts))]
        here, port = own_address(servers[0].address), free_port()
        joins = [
            self._calls.submit(server.join_transfer_group, here, port, first, 1 + sum(counts))
            for server, first in zip(servers, firsts, strict=True)
        ]
        self._transfer_group = join_transfer_group(here, port, 0, 1 + sum(counts), self._device)
        for join in joins:
            join.result()


def _drained(weights: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Take part in gathering the weights, and send nothing."""
    for _ in weights:
        pass
    yield from ()
