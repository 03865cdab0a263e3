from __future__ import annotations

import pytest
import torch

from fivefold.layout import ParallelLayout
from tests.support.shards import shard_of_replica


def exchange(mesh, count: int):
    ranks = mesh.ranks
    items = list(range(count))
    replica, items_of_rank = shard_of_replica(ranks, items), ranks.shard(items)
    rows = torch.tensor([[item, 10 * item] for item in items_of_rank], dtype=torch.long).view(-1, 2)
    within = [piece.tolist() for piece in ranks.all_gather_within_replica(rows)]
    world = [piece.tolist() for piece in ranks.all_gather_world(rows)]
    # Each rank sends item i to replica i mod dp, where it came from: what arrives is what was sent.
    order = sorted(range(len(items_of_rank)), key=lambda i: items_of_rank[i] % ranks.layout.dp)
    counts = [sum(item % ranks.layout.dp == dp for item in items_of_rank) for dp in range(ranks.layout.dp)]
    expected = [len(items_of_rank) if dp == ranks.coords.dp else 0 for dp in range(ranks.layout.dp)]
    back = ranks.all_to_all_replicas(rows[order], counts, expected).tolist()
    assert back == rows.tolist()
    return replica, items_of_rank, within, world, ranks.any(ranks.rank == 1), ranks.all_reduce_max(ranks.rank)


@pytest.mark.parametrize("layout", ["megatron:d2t2", "megatron:d2p2", "megatron:t2p2", "megatron:d4"])
@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_a_list_is_sharded_over_all_ranks_and_rows_are_gathered_in_order(cluster, layout, count):
    results = cluster.run(exchange, layout, count)
    owned = [items_of_rank for _, items_of_rank, *_ in results]
    assert sorted(item for items_of_rank in owned for item in items_of_rank) == list(range(count))
    for replica, items_of_rank, within, world, flag, highest in results:
        assert set(items_of_rank) <= set(replica)
        assert sorted(row[0] for piece in within for row in piece) == replica
        assert world == [[[item, 10 * item] for item in one] for one in owned]
        assert flag
        assert highest == 3


def told(mesh, layout: str, first: int):
    """What the ranks of a layout that others have nothing of know of each other, and all of them."""
    ranks = mesh.ranks.on_layout(ParallelLayout.parse(f"megatron:{layout}"), first)
    numbers = torch.tensor([0.1, 0.2, 0.3]).double() ** (ranks.coords.dp + 1) if ranks.holds else torch.zeros(3).double()
    rows = torch.full((max(0, 2 * ranks.coords.dp), 2), ranks.coords.dp)
    places = [shard_of_replica(ranks, range(10)), ranks.shard(range(10))]
    arrived = ranks.all_to_all_replicas(rows[:0], [0] * ranks.layout.dp, [0] * ranks.layout.dp)
    return (
        ranks.holds, places, ranks.all_reduce_sum(numbers).tolist(), torch.cat(ranks.all_gather_replicas(rows)).tolist(),
        ranks.broadcast_from_leader(ranks.rank if ranks.leads else None), len(arrived), ranks.any(ranks.rank == 3),
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "first"), [("d3", 0), ("d2", 1), ("t2", 2), ("d1t2", 0), ("p2", 1)])
def test_ranks_that_have_nothing_of_a_layout_know_what_its_ranks_know(cluster, layout, first):
    results = cluster.run(told, "megatron:d4", layout, first)
    size = ParallelLayout.parse(f"megatron:{layout}").world_size
    assert [rank for rank, (holds, *_) in enumerate(results) if holds] == list(range(first, first + size))
    assert sorted(item for _, (_, items_of_rank), *_ in results for item in items_of_rank) == list(range(10))
    for holds, places, sums, rows, leader, _, anybody in results:
        assert holds or places == [[], []]
        # Bit for bit, so that all take the same decisions.
        assert (sums, rows) == tuple(results[first][2:4])
        assert (leader, anybody) == (first, True)
    dp = ParallelLayout.parse(f"megatron:{layout}").dp
    assert results[first][3] == [[replica] * 2 for replica in range(dp) for _ in range(2 * replica)]


def called(mesh, name: str, path, fault: bool):
    """Four ranks of two machines, each with a first one; the call takes longer than the ranks wait for each other."""
    import os
    import socket
    import time

    from fivefold.distributed import calls
    from fivefold.errors import UserError

    rank = mesh.ranks.rank
    os.environ["LOCAL_RANK"] = str(rank % 2)
    socket.gethostname = lambda: f"machine-{rank // 2}"

    def function() -> str:
        time.sleep(0.5)
        with (path / "calls").open("a") as file:
            file.write(f"{rank}\n")
        if fault and rank in (0, 2):
            raise UserError("a row cannot be used")
        return f"what rank {rank} found"

    try:
        return getattr(calls, name)(mesh.ranks, function)
    except UserError as error:
        return str(error)


def test_one_rank_of_each_machine_is_called_and_its_fault_is_everybody_s(cluster, tmp_path):
    texts = cluster.run(called, "megatron:d4", "call_once_a_machine", tmp_path, False)
    assert texts == ["what rank 0 found"] * 2 + ["what rank 2 found"] * 2
    assert sorted((tmp_path / "calls").read_text().split()) == ["0", "2"]
    assert cluster.run(called, "megatron:d4", "call_once_a_machine", tmp_path, True) == ["a row cannot be used"] * 4


def test_rank_0_alone_is_called_for_all_however_long_it_takes(cluster, tmp_path):
    assert cluster.run(called, "megatron:d4", "call_once", tmp_path, False) == ["what rank 0 found"] * 4
    assert (tmp_path / "calls").read_text().split() == ["0"]
    assert cluster.run(called, "megatron:d4", "call_once", tmp_path, True) == ["a row cannot be used"] * 4
