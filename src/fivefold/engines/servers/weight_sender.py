"""Sends the policy's weights to servers on the same devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.objects import all_gather_json
from fivefold.distributed.ranks import Ranks
from fivefold.engines.servers.buckets import Bucket, BucketWriter, DeviceMemory, HostMemory, Memory
from fivefold.engines.servers.server import Server, ServerLostError
from fivefold.engines.weight_sync import crossed_off


@dataclass(frozen=True)
class Delivery:
    """Weights of one version for this rank's servers."""

    servers: Mapping[int, Server]
    """Servers by number."""
    weights: Iterator[tuple[str, Tensor]]
    missing: set[str]
    """Names of tensors that did not arrive yet; a name is removed when its tensor arrives."""
    verify: bool
    """Whether servers compare what they hold with what was sent."""
    version: int
    begin: Callable[[], None]
    """Called before the servers receive anything."""


class Sender(Protocol):
    """Delivers the policy's weights to servers."""

    def deliver(self, delivery: Delivery) -> tuple[list[str], set[int]]:
        """Delivers weights; returns what is wrong with them on the servers, and the servers that are gone. Collective."""
        ...


class WeightSender:
    """Delivers weights in buckets to servers on this rank's devices, in memory that they map."""

    def __init__(self, ranks: Ranks, device: torch.device, ranks_per_server: int, bucket_bytes: int) -> None:
        """`ranks_per_server`: number of ranks that send the weights of one server."""
        self._device, self._group = device, ranks.consecutive(ranks_per_server)
        self._writer = BucketWriter(bucket_bytes, self._allocate)
        self._calls = ThreadPoolExecutor()
        self._servers: Mapping[int, Server] = {}
        self._lost: set[int] = set()

    def deliver(self, delivery: Delivery) -> tuple[list[str], set[int]]:
        """Delivers as `Sender.deliver` does."""
        delivery.begin()
        self._servers, self._lost = delivery.servers, set()
        is_whole = False
        self._settle(self._ask("begin_weights", delivery.verify))
        try:
            self._send(crossed_off(delivery.weights, delivery.missing))
            is_whole = not delivery.missing
        finally:
            faults = self._settle(self._ask("finish_weights", is_whole, delivery.version))
            self._writer.close()
        return [fault for faults_of_server in faults for fault in faults_of_server], self._lost

    def _send(self, coming: Iterator[tuple[str, Tensor]]) -> None:
        """Fill one bucket while the servers read the other."""
        under_way: deque[dict[int, Future[Any]]] = deque()
        for bucket in self._writer.buckets(coming):
            handles = self._handles(bucket)
            under_way.append(self._ask("receive_bucket", handles, bucket.entries, bucket.used))
            if len(under_way) > 1:
                self._settle(under_way.popleft())
            # The next bucket reuses the memory of the one before.
            self._meet()
        while under_way:
            self._settle(under_way.popleft())
        self._meet()

    def _allocate(self, size: int) -> Memory:
        return DeviceMemory(size, self._device) if self._device.type == "cuda" else HostMemory(size)

    def _handles(self, bucket: Bucket) -> list[dict[str, Any]]:
        """Returns the handles of all ranks that send a server's weights, after all have filled their buckets."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self._group is None:
            return [bucket.memory.handle]
        return all_gather_json(bucket.memory.handle, self._group)

    def _meet(self) -> None:
        """Wait until the first of the ranks that send a server's weights has seen what has been read."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def _ask(self, name: str, *arguments: Any) -> dict[int, Future[Any]]:
        """Call this rank's servers, except those that are gone: one that is stopped would let each call wait again."""
        return {
            number: self._calls.submit(getattr(server, name), *arguments)
            for number, server in self._servers.items()
            if number not in self._lost
        }

    def _settle(self, calls: Mapping[int, Future[Any]]) -> list[Any]:
        """Returns the answers of this rank's servers; records those that are gone."""
        answers = []
        for number, call in calls.items():
            try:
                answers.append(call.result())
            except ServerLostError:
                self._lost.add(number)
        return answers
