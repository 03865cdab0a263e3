"""Process groups of one trainer rank and the workers of servers: the rank broadcasts its data to all of them at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from fivefold.distributed import rendezvous


def open_store(address: str, port: int | None, seconds: float) -> Store:
    """Opens the store in which the members of groups find each other.

    Without a port this process holds it, and listens on this address only. A member that does not answer within `seconds` is
    an error, also in groups that are joined there.
    """
    return rendezvous.open_store(address, port or 0, timedelta(seconds=seconds), is_held=port is None)


def join_groups(store: Store, names: Sequence[str], rank: int, size: int, device: torch.device) -> list[Any]:
    """Returns this process's membership of groups that are separate from all others: NCCL on GPUs, Gloo on hosts.

    Rank 0 sends, and is in one of the groups. The others are in all of them, and join them in the same order. Senders that
    have several sets of members join them in the same order too.
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
        # NCCL connects with the first message: a failure of that must not look like lost weights.
        broadcast(groups[-1], torch.zeros(1, dtype=torch.uint8, device=device)).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return groups


def broadcast(group: Any, bytes_B: Tensor) -> dist.Work:
    """Broadcasts from the group's first member to the others; complete when the returned work is."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    work: dist.Work = group.broadcast([bytes_B], options)
    return work


def leave(groups: list[Any]) -> None:
    """Aborts groups in which a member may be waiting for another one that is gone, and empties the list."""
    while groups:
        held = [groups.pop()]
        if isinstance(held[0], dist.ProcessGroupGloo):
            # Gloo's groups wait, when they are dropped, until the others have taken what was sent, or are gone.
            threading.Thread(target=_abort, args=(held,), daemon=True).start()
        else:
            _abort(held)


def _abort(held: list[Any]) -> None:
    held[0].abort()
    held.clear()
