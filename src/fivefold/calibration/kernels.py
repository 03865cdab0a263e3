"""Measures products, optimizer and copies one by one: device -> rates in the units of their kinds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fivefold.calibration.profile import seconds_by_kind
from fivefold.plan.costs import ADAM_BYTES, GRADIENT_BYTES, HOST_ADAM_BYTES

_LARGE, _SMALL = 0.4, 0.05
"""Seconds for which a piece of work is repeated, on a GPU and on a CPU."""
_PROFILED = 3
"""Number of runs of the work whose kernels are timed."""
_LONG, _MOST_TIMES = 5e-3, 1000
"""Seconds of queued work that make launch and final wait negligible, and the maximum number of repetitions in a row."""


@dataclass(frozen=True)
class Clock:
    """Times work on a device until a deadline."""

    device: torch.device
    deadline: float
    """Time of the monotonic clock at which measuring must end."""

    @property
    def is_large(self) -> bool:
        """The device is a GPU, for which sizes are those of real models."""
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the shortest time of several runs in seconds; the first two, which compile and allocate, are left out."""
        self.once(work)
        end = time.monotonic() + min(_LARGE if self.is_large else _SMALL, max(0.0, self.left))
        times = min(_MOST_TIMES, math.ceil(_LONG / self.once(work)))
        best = self.once(work, times)
        while time.monotonic() < end:
            best = min(best, self.once(work, times))
        return best

    def by_kind(self, work: Callable[[], Any]) -> dict[str, float]:
        """Return the device's seconds for every kind of work; the first runs, which compile and allocate, are left out."""
        self.once(work, 2)
        return seconds_by_kind(work, self.device, _PROFILED)

    def once(self, work: Callable[[], Any], times: int = 1) -> float:
        """Return the seconds per run of `times` runs in a row: a queued run is launched while the one before it runs."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        self._wait()
        return (time.perf_counter() - begin) / times

    def _wait(self) -> None:
        if self.is_large:
            torch.cuda.synchronize()


def products(clock: Clock) -> Iterator[tuple[str, float, float]]:
    """Measure bfloat16 products of many rows with weights, one side of which a layout has sharded."""
    rows, hidden = (16384, 2048) if clock.is_large else (512, 512)
    for size in (128, 512, 1024, 2048, 4096, 8192) if clock.is_large else (32, 128, 512):
        if clock.left <= 0:
            return
        inner = max(size, hidden)
        left = torch.randn(rows, inner, device=clock.device).bfloat16()
        right = torch.randn(inner, size, device=clock.device).bfloat16()
        out = torch.empty(rows, size, device=clock.device, dtype=torch.bfloat16)
        seconds = clock.seconds(partial(torch.mm, left, right, out=out))
        yield "gemm", size, 2 * rows * inner * size / seconds / 1e12


def optimizer(clock: Clock) -> Iterator[tuple[str, float, float]]:
    """Measure Adam over float32 shards, and the passes over gradients around it."""
    if clock.left <= 0:
        return
    count = 1 << (28 if clock.is_large else 20)
    weight = torch.nn.Parameter(torch.zeros(count, device=clock.device))
    weight.grad = torch.ones_like(weight)
    half = torch.zeros(count, device=clock.device, dtype=torch.bfloat16)
    adam = torch.optim.AdamW([weight], fused=clock.is_large)

    def update() -> None:
        adam.step()
        half.copy_(weight.detach())

    yield "adam", 0, count * ADAM_BYTES / clock.seconds(update) / 1e9
    gradient = weight.grad

    def around() -> None:
        gradient.norm()
        gradient.mul_(0.5)
        gradient.zero_()

    yield "gradients", 0, count * GRADIENT_BYTES / clock.seconds(around) / 1e9
    yield "host_adam", 0, count * HOST_ADAM_BYTES / clock.seconds(_host_update(count)) / 1e9


def _host_update(count: int) -> Callable[[], None]:
    """Return an update of so many parameters in host memory, as `policy.fsdp.cpu_adam` takes it."""
    weight = torch.nn.Parameter(torch.zeros(count))
    weight.grad = gradient = torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], fused=True)

    def update() -> None:
        torch._foreach_norm([gradient])
        torch._foreach_mul_([gradient], 0.5)
        adam.step()

    return update


def copies(clock: Clock) -> Iterator[tuple[str, float, float]]:
    """Measure copies between pinned host memory and the device, and a read of the device's memory, as decoding does."""
    if clock.left <= 0:
        return
    count = 1 << (30 if clock.is_large else 24)
    on_device = torch.zeros(count, dtype=torch.int8, device=clock.device)
    host = torch.zeros(count, dtype=torch.int8, pin_memory=clock.is_large)
    yield "host_copy", 0, count / clock.seconds(lambda: on_device.copy_(host, non_blocking=True)) / 1e9
    numbers = on_device.view(torch.float32)
    yield "decode_memory", 0, count / clock.seconds(numbers.sum) / 1e9
