"""Weights on their way to another process: tensors laid into buckets of memory that it maps or is sent.

On one machine nothing is copied through a socket: a bucket is a file without a name on the host, or GPU memory that both
processes map. Between machines it is broadcast over a process group of trainer and engine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.engines.servers import cuda_memory

Entry = tuple[str, str, list[int], int]
"""Name, dtype, shape and first byte of a tensor in a bucket."""
_ALIGNMENT = 256


class Memory(Protocol):
    """The memory of one bucket, on the sender's side."""

    bytes_B: Tensor
    handle: dict[str, Any]
    """By which the other process finds it; JSON."""

    def free(self) -> None: ...


class HostMemory:
    """Pages of a file without a name, which end with the last process that maps them."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("fivefold-weights")
        os.ftruncate(self._file, size)
        self.bytes_B = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        self.handle = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": size}

    def free(self) -> None:
        os.close(self._file)


class DeviceMemory:
    """GPU memory that the receivers map."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes_B, key = cuda_memory.allocate(size, device)
        self.handle = {"cuda": key, "size": size}

    def free(self) -> None:
        cuda_memory.free(self.bytes_B)


class BroadcastMemory:
    """Memory that is broadcast to the receivers, who have as much of their own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes_B = torch.empty(size, dtype=torch.uint8, device=device)
        self.handle = {"broadcast": True, "size": size}

    def free(self) -> None:
        """It ends with the last tensor on it."""


def join_transfer_group(address: str, port: int, rank: int, size: int, device: torch.device) -> Any:
    """A process group apart from every other of this process: NCCL on GPUs, Gloo on hosts."""
    store = dist.TCPStore(address, port, size, rank == 0, timedelta(seconds=_PATIENCE), wait_for_workers=False)  # type: ignore[attr-defined]
    prefixed = dist.PrefixStore("fivefold-weights", store)  # type: ignore[attr-defined]
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_PATIENCE)
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    return dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=_PATIENCE))


def broadcast(group: Any, bytes_B: Tensor) -> None:
    """From the group's first member to the others."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([bytes_B], options).wait()


_PATIENCE = 300.0
"""Seconds after which a partner who does not answer is an error."""


@dataclass
class Bucket:
    """Tensors one after the other in a piece of memory."""

    memory: Memory
    used: int = 0
    entries: list[Entry] = field(default_factory=list)

    def room_for(self, tensor: Tensor) -> bool:
        return self.used + tensor.nbytes <= self.memory.bytes_B.numel()

    def add(self, name: str, tensor: Tensor) -> None:
        place = self.memory.bytes_B[self.used : self.used + tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.used))
        self.used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class BucketWriter:
    """Two buckets in turn: one is filled while the other is read."""

    def __init__(self, size: int, allocate: Any) -> None:
        """`allocate(size)` gives a Memory; a tensor that is larger than a bucket gets one of its size."""
        self._size, self._allocate = size, allocate
        self._slots: list[Memory | None] = [None, None]

    def buckets(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """Filled ones; when the next is asked for, the one before the last must have been read."""
        turn, bucket = 0, None
        for name, tensor in weights:
            if bucket is not None and not bucket.room_for(tensor):
                yield bucket
                turn, bucket = 1 - turn, None
            if bucket is None:
                bucket = Bucket(self._slot(turn, tensor.nbytes))
            bucket.add(name, tensor)
        if bucket is not None:
            yield bucket

    def _slot(self, turn: int, least: int) -> Memory:
        memory = self._slots[turn]
        if memory is None or memory.bytes_B.numel() < least:
            if memory is not None:
                memory.free()
            memory = self._slots[turn] = self._allocate(max(self._size, least))
        return memory

    def close(self) -> None:
        for memory in self._slots:
            if memory is not None:
                memory.free()
        self._slots = [None, None]


class BucketReader:
    """The receiver's side: maps each bucket's memory once."""

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self._device, self._transfer_group = device, group
        self._open: dict[str, Tensor] = {}

    def take(self, handle: dict[str, Any], entries: Sequence[Entry], used: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a bucket, copied out of it: it may be overwritten afterwards."""
        bytes_B = self._memory(handle)
        if "broadcast" in handle:
            broadcast(self._transfer_group, bytes_B[:used])
        for name, dtype, shape, begin in entries:
            kind = getattr(torch, dtype)
            end = begin + kind.itemsize * torch.Size(shape).numel()
            yield name, bytes_B[begin:end].view(kind).view(shape).clone()

    def _memory(self, handle: dict[str, Any]) -> Tensor:
        if "broadcast" in handle:
            return torch.empty(handle["size"], dtype=torch.uint8, device=self._device)
        key = str(sorted(handle.items()))
        if key not in self._open:
            if "cuda" in handle:
                self._open[key] = cuda_memory.attach(handle["cuda"], handle["size"], self._device)
            else:
                with open(handle["path"], "r+b") as file:
                    self._open[key] = torch.frombuffer(mmap.mmap(file.fileno(), handle["size"]), dtype=torch.uint8)
        return self._open[key]

    def close(self) -> None:
        for memory in self._open.values():
            if memory.is_cuda:
                cuda_memory.detach(memory)
        self._open.clear()
