"""Process groups between a trainer's rank and the workers of servers."""

from __future__ import annotations

import threading
import time

import torch

from fivefold.engines.servers.transfer import broadcast, join_groups, leave, open_store

SECONDS = 60.0
"""Time limit of the groups, after which Gloo gives up by itself."""


def joined(rank: int, port: int, groups: dict[int, list]) -> None:
    store = open_store("127.0.0.1", port, SECONDS)
    groups[rank] = join_groups(store, ["weights"], rank, 2, torch.device("cpu"))


def test_a_rank_leaves_a_group_at_once_although_a_partner_takes_nothing():
    """The partner lives, but waits for another sender that is gone: the run ends it only after the rank has left."""
    store, groups = open_store("127.0.0.1", None, SECONDS), dict[int, list]()
    partner = threading.Thread(target=joined, args=(1, store.port, groups))
    partner.start()
    joined(0, store.port, groups)
    partner.join()
    # More than what fits into the buffers between the two.
    works = [broadcast(groups[0][0], torch.zeros(1 << 25, dtype=torch.uint8)) for _ in range(2)]
    time.sleep(0.2)
    assert not any(work.is_completed() for work in works)
    begin = time.monotonic()
    leave(groups[0])
    works.clear()
    assert groups[0] == [] and time.monotonic() - begin < SECONDS / 4
    leave(groups[1])
