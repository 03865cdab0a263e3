"""Measures bandwidth between the GPUs of this machine, or between two processes on a CPU: messages -> rates."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from fivefold.calibration.kernels import Clock
from fivefold.distributed.ports import on_one_machine
from fivefold.distributed.rendezvous import join


def links(clock: Clock) -> Iterator[tuple[str, float, float]]:
    """Yield the bus bandwidth of an all-gather, and the rate of data leaving a rank in an all-to-all, by message size."""
    world = torch.cuda.device_count() if clock.is_large else 2
    if world < 2 or clock.left <= 0:
        return
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rates.json"
        spawn(_rank, (world, clock.device.type, clock.deadline, str(out)), nprocs=world)
        yield from json.loads(out.read_text())


def _rank(rank: int, world: int, kind: str, deadline: float, out: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), **on_one_machine(Path(out).parent))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    join("nccl" if kind == "cuda" else "gloo", max(1.0, deadline - time.monotonic()) / 60)
    # All ranks must measure equally often, whatever their clocks show.
    sizes = (10**6, 10**7, 10**8, 10**9) if kind == "cuda" else (10**5, 10**6, 10**7)
    clock, rates = Clock(device, deadline), []
    for size in sizes:
        part = size // world
        gathered, shard = (torch.zeros(count, dtype=torch.int8, device=device) for count in (part * world, part))
        other = torch.zeros_like(gathered)
        gather = _shortest(clock, partial(dist.all_gather_into_tensor, gathered, shard))
        exchange = _shortest(clock, partial(dist.all_to_all_single, other, gathered))
        moved = part * (world - 1) / 1e9
        rates += [("node_link", size, moved / gather), ("node_exchange", size, moved / exchange)]
    if rank == 0:
        Path(out).write_text(json.dumps(rates))
    dist.destroy_process_group()


def _shortest(clock: Clock, work: Callable[[], Any]) -> float:
    """Return the shortest time of ten series of four runs, on the slowest rank."""
    best = float("inf")
    for _ in range(10):
        dist.barrier()
        best = min(best, clock.once(work, 4))
    slowest = torch.tensor(best, device=clock.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
