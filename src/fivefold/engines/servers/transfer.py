"""Process groups of one trainer rank and the workers of servers: what the rank has goes to all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from fivefold.distributed import rendezvous


def open_store(address: str, port: int | None, seconds: float) -> Store:
    """The store in which the members of groups find each other; without a port this process holds it, and listens on this
    address only. A partner that does not answer for so many seconds is an error, also in groups that are joined there."""
    return rendezvous.open_store(address, port or 0, timedelta(seconds=seconds), is_held=port is None)


def join_groups(store: Store, names: Sequence[str], rank: int, size: int, device: torch.device) -> list[Any]:
    """This process's part of groups apart from every other: NCCL on GPUs, Gloo on hosts.

    Rank 0 sends, and is in one of the groups; the others are in all of them, which they join in the same order.
    """
    groups: list[Any] = []
    timeout = store.timeout  # type: ignore[attr-defined]
    for name in names:
        prefixed = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            groups.append(dist.ProcessGroupNCCL(prefixed, rank, size, options))
        else:
            groups.append(dist.ProcessGroupGloo(prefixed, rank, size, timeout))
        # NCCL connects with the first message: what goes wrong then shall not look like lost weights.
        broadcast(groups[-1], torch.zeros(1, dtype=torch.uint8, device=device)).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return groups


def broadcast(group: Any, bytes_B: Tensor) -> dist.Work:
    """From the group's first member to the others; done when the work is."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    work: dist.Work = group.broadcast([bytes_B], options)
    return work


def leave(groups: Sequence[Any]) -> None:
    """Give up groups in which somebody may be waiting for another one who is gone."""
    for group in groups:
        group.abort()
