from __future__ import annotations

from fivefold.distributed.hosts import on_hosts


def test_ranks_are_named_with_their_hosts():
    assert on_hosts(["a", "a", "b"], [2]) == "rank 2 on b"
    assert on_hosts(["a", "a", "b"], [0, 1, 2]) == "ranks 0, 1 on a, rank 2 on b"


def met(mesh, ahead: float):
    """What a rank learns where the host of rank 1 has another name and a clock that is ahead."""
    from fivefold.distributed import hosts

    rank, real_time = mesh.ranks.rank, hosts.time.time
    hosts.socket.gethostname = lambda: ("north", "south")[rank]
    hosts.time.time = lambda: real_time() + ahead * rank
    try:
        return hosts.meet(mesh.ranks.world)
    finally:
        hosts.time.time = real_time


def test_a_clock_that_differs_is_named_on_every_rank_with_host_and_seconds(cluster):
    for names, (sentence,) in cluster.run(met, "megatron:d2", -90.0):
        assert names == ["north", "south"]
        assert sentence.startswith("the clock of rank 1 on south is 90 s earlier than that of rank 0 on north")
    assert [differences for _, differences in cluster.run(met, "megatron:d2", 1.0)] == [[], []]
