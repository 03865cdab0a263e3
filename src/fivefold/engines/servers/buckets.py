"""Transfers weights to another process: tensors packed into buckets of memory, which it maps or receives.

On the same device nothing is copied through a socket: a bucket is an unnamed file on the host, or GPU memory that both
processes map. To other devices each sender broadcasts its part of every bucket over a process group.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.engines.servers import cuda_memory
from fivefold.engines.servers.transfer import broadcast

Entry = tuple[str, str, list[int], int]
"""Name, dtype, shape and first byte in a bucket, of a tensor or of each sender's part of it."""
_ALIGNMENT = 256


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Memory(Protocol):
    """The memory of one bucket, on the sender's side."""

    bytes_B: Tensor
    handle: dict[str, Any]
    """Handle by which the other process finds the memory; JSON."""

    def free(self) -> None: ...


class HostMemory:
    """Pages of an unnamed file, which are freed with the last process that maps them."""

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
    """Memory that is broadcast to the receivers, which allocate the same amount."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes_B = torch.empty(size, dtype=torch.uint8, device=device)
        self.handle = {"broadcast": True}

    def free(self) -> None:
        """Does nothing: the memory is freed with the last tensor on it."""


class NoMemory(BroadcastMemory):
    """Memory of a rank that tracks what is sent, but sends nothing."""

    def __init__(self, size: int) -> None:
        super().__init__(size, torch.device("meta"))


@dataclass(frozen=True)
class Part:
    """The bytes of every tensor that a sender has: the `index`th of `count` equal parts, of which the last may be
    smaller."""

    index: int = 0
    count: int = 1

    def size(self, nbytes: int) -> int:
        """Returns the bytes that each part of a tensor takes."""
        return -(-nbytes // self.count)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the bytes of this part."""
        size = self.size(tensor.nbytes)
        return tensor.reshape(-1).view(torch.uint8)[self.index * size : (self.index + 1) * size]


WHOLE = Part()


@dataclass
class Bucket:
    """Tensors, or a part of each, one after the other in a block of memory."""

    memory: Memory
    part: Part = WHOLE
    used: int = 0
    entries: list[Entry] = field(default_factory=list)

    def room_for(self, tensor: Tensor) -> bool:
        return self.used + self.part.size(tensor.nbytes) <= self.memory.bytes_B.numel()

    def add(self, name: str, tensor: Tensor) -> None:
        if not self.memory.bytes_B.is_meta:
            part = self.part.of(tensor)
            self.memory.bytes_B[self.used : self.used + part.numel()].copy_(part)
        self.entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.used))
        self.used += _aligned(self.part.size(tensor.nbytes))


class BucketWriter:
    """Fills two buckets in turn: one is filled while the other is read."""

    def __init__(self, size: int, allocate: Callable[[int], Memory], part: Part = WHOLE) -> None:
        """`size`: bytes of whole tensors in a bucket; `allocate(size)` returns memory for this sender's part of them. A
        larger tensor gets a bucket of its own size."""
        self._size, self._allocate, self._part = _aligned(part.size(size)), allocate, part
        self._slots: list[Memory | None] = [None, None]
        self._kept: list[Memory] = []

    def buckets(self, weights: Iterator[tuple[str, Tensor]], keeps: bool = False) -> Iterator[Bucket]:
        """Yields filled buckets. When the next one is requested, the one before the last must have been read.

        `keeps`: all buckets stay intact until `close`.
        """
        turn, bucket = 0, None
        for name, tensor in weights:
            if bucket is not None and not bucket.room_for(tensor):
                yield bucket
                turn, bucket = 1 - turn, None
            if bucket is None:
                least = _aligned(self._part.size(tensor.nbytes))
                bucket = Bucket(self._allocate_kept(least) if keeps else self._slot(turn, least), self._part)
            bucket.add(name, tensor)
        if bucket is not None:
            yield bucket

    def _allocate_kept(self, least: int) -> Memory:
        self._kept.append(self._allocate(max(self._size, least)))
        return self._kept[-1]

    def _slot(self, turn: int, least: int) -> Memory:
        memory = self._slots[turn]
        if memory is None or memory.bytes_B.numel() < least:
            if memory is not None:
                memory.free()
            memory = self._slots[turn] = self._allocate(max(self._size, least))
        return memory

    def close(self) -> None:
        for memory in [*self._slots, *self._kept]:
            if memory is not None:
                memory.free()
        self._slots, self._kept = [None, None], []


class BucketReader:
    """The receiver's side: maps each bucket's memory once, or receives the parts that senders broadcast."""

    def __init__(self, device: torch.device, groups: Sequence[Any] = ()) -> None:
        """`groups`: one process group for each sender, in the order of their parts."""
        self._device, self._groups = device, groups
        self._open: dict[str, Tensor] = {}
        self._taken_B = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, handle: dict[str, Any], entries: Sequence[Entry], used: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a bucket, copied out of it: the bucket may be overwritten afterwards."""
        parts_RB = self._received(used) if "broadcast" in handle else self._mapped(handle)[None]
        for name, dtype, shape, begin in entries:
            kind = getattr(torch, dtype)
            nbytes = kind.itemsize * torch.Size(shape).numel()
            end = begin + Part(count=len(parts_RB)).size(nbytes)
            whole_B = parts_RB[:, begin:end].clone(memory_format=torch.contiguous_format).view(-1)[:nbytes]
            yield name, whole_B.view(kind).view(shape)

    def _received(self, used: int) -> Tensor:
        """Returns [senders, used]: all of them send at the same time."""
        size = len(self._groups) * used
        if self._taken_B.numel() < size:
            self._taken_B = self._taken_B.new_empty(size)
        parts_RB = self._taken_B[:size].view(len(self._groups), used)
        for work in [broadcast(group, part) for group, part in zip(self._groups, parts_RB, strict=True)]:
            work.wait()
        return parts_RB

    def _mapped(self, handle: dict[str, Any]) -> Tensor:
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
        self._taken_B = self._taken_B.new_empty(0)
