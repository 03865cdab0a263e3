from __future__ import annotations

import pytest


def exchange(mesh, count: int):
    ranks = mesh.ranks
    items = [f"item {i}" for i in range(count)]
    replica, own = ranks.shard(items)
    gathered = ranks.all_gather_within_replica(own)
    everything = ranks.all_gather_replicas([item.upper() for item in gathered])
    return replica, own, gathered, everything, ranks.any(ranks.rank == 1), ranks.all_reduce_max(ranks.rank)


@pytest.mark.parametrize("layout", ["megatron:d2t2", "megatron:d2p2", "megatron:t2p2", "megatron:d4"])
@pytest.mark.parametrize("count", [1, 3, 8, 9])
def test_what_is_shared_comes_together_again_in_order(cluster, layout, count):
    results = cluster.run(exchange, layout, count)
    items = [f"item {i}" for i in range(count)]
    assert sorted(item for _, own, *_ in results for item in own) == sorted(items)
    for replica, _, gathered, everything, flag, highest in results:
        assert gathered == replica
        assert everything == [item.upper() for item in items]
        assert flag
        assert highest == 3
