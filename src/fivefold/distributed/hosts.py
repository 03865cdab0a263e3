"""The hosts of a run's ranks: their names and clocks, and which of them answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fivefold.distributed.objects import all_gather_json

_ROLL_CALL_SECONDS = 5.0
"""Seconds in which ranks must answer the roll call, after some were unheard of."""
_CLOCK_SECONDS = 5.0
"""Difference between the clocks of two hosts that is reported."""


def meet(group: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """Returns the host of each rank, and a sentence for each host whose clock differs from that of rank 0's host."""
    names = all_gather_json(socket.gethostname(), group)
    # Ranks arrive at different times; after the barrier they read their clocks within a moment.
    dist.barrier(group=group)
    clocks = all_gather_json(time.time(), group)
    differences = {name: clock - clocks[0] for name, clock in zip(names, clocks, strict=True)}
    return names, [
        f"the clock of {on_hosts(names, [names.index(name)])} is {abs(difference):.0f} s "
        f"{'later' if difference > 0 else 'earlier'} than that of {on_hosts(names, [0])}: times in files and traces differ "
        "by as much, and the run is not affected; set the clocks by NTP"
        for name, difference in differences.items()
        if abs(difference) > _CLOCK_SECONDS
    ]


def on_hosts(names: Sequence[str], ranks: Iterable[int]) -> str:
    """Returns ranks with their hosts, as text: `ranks 0, 1 on a, rank 2 on b`."""
    members: dict[str, list[int]] = {}
    for rank in ranks:
        members.setdefault(names[rank], []).append(rank)
    return ", ".join(
        f"rank{'s' if len(ranks_there) > 1 else ''} {', '.join(map(str, ranks_there))} on {name}"
        for name, ranks_there in members.items()
    )


def roll_call(names: Sequence[str]) -> str:
    """Returns which ranks do not answer at the rendezvous, as a message."""
    absent: list[int] = []
    store = distributed_c10d._get_default_store()

    def call() -> None:
        store.set(f"here/{dist.get_rank()}", "")
        time.sleep(_ROLL_CALL_SECONDS)
        absent.extend(rank for rank in range(dist.get_world_size()) if not store.check([f"here/{rank}"]))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2 * _ROLL_CALL_SECONDS)
    if caller.is_alive():
        return f"{on_hosts(names, [0])}, which holds the rendezvous, does not answer"
    if not absent:
        return "every rank answers at the rendezvous"
    return f"{on_hosts(names, absent)} {'do' if len(absent) > 1 else 'does'} not answer"
