"""Servers on GPUs of their own: which machine, which GPUs, which rank starts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config import RunConfig
from fivefold.engines.servers.placement import Machine, ServerPlace, after_servers, machines_of, place_servers
from fivefold.layout import ParallelLayout
from fivefold.plan.engine_placement import device_rows


def test_servers_stand_after_the_ranks_and_are_started_by_them_in_turn():
    places = place_servers(ParallelLayout.parse("vllm:d3t2"), [Machine(range(2), 8, range(2))])
    assert places == [ServerPlace(0, 0, 0, 2), ServerPlace(1, 0, 1, 4), ServerPlace(2, 0, 0, 6)]


def test_servers_are_spread_evenly_over_machines():
    machines = machines_of(["a", "a", "b", "b", "c"], [8, 8, 4, 4, 8], range(5))
    assert machines == [Machine([0, 1], 8, [0, 1]), Machine([2, 3], 4, [2, 3]), Machine([4], 8, [4])]
    places = place_servers(ParallelLayout.parse("vllm:d5t2"), machines)
    assert [(place.machine, place.rank, place.first_gpu) for place in places] == [
        (0, 0, 2), (0, 1, 4), (1, 2, 2), (2, 4, 1), (2, 4, 3),
    ]  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 16)), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 40),
)
def test_no_gpu_has_two_masters_and_none_is_asked_for_that_is_not_there(sizes, dp, tp, on_gpus, policy):
    """The first `policy` ranks hold the policy: only they start servers."""
    begins = [sum(ranks for ranks, _ in sizes[:place]) for place in range(len(sizes))]
    machines = [
        Machine(range(begin, begin + ranks), gpus if on_gpus else None, range(begin, max(begin, min(begin + ranks, policy))))
        for begin, (ranks, gpus) in zip(begins, sizes, strict=True)
    ]
    layout = ParallelLayout.parse(f"vllm:d{dp}t{tp}")
    can_start = [(ranks, gpus) for begin, (ranks, gpus) in zip(begins, sizes, strict=True) if begin < policy]
    room = sum(max(0, gpus - ranks) // tp for ranks, gpus in can_start) if on_gpus else dp
    if room < dp:
        with pytest.raises(ValueError, match=f"apart needs {dp * tp} GPUs after those of the ranks"):
            place_servers(layout, machines)
        return
    places = place_servers(layout, machines)
    assert [place.number for place in places] == list(range(dp))
    for number, machine in enumerate(machines):
        placed_here = [place for place in places if place.machine == number]
        assert all(place.rank in machine.ranks and place.rank < policy for place in placed_here)
        if on_gpus:
            taken = [place.first_gpu + index for place in placed_here for index in range(tp)]
            assert len(set(taken)) == len(taken)
            assert all(len(machine.ranks) <= gpu < machine.gpus for gpu in taken)


def placed(mesh):
    """What each rank would start, where the second of three is on a machine of its own."""
    import ctypes
    import socket

    from fivefold.build_engine import _own_servers

    new_host_name = 0x04000000
    may = ctypes.CDLL(None).unshare(new_host_name) == 0
    if all(mesh.ranks.gather_objects(may)):
        socket.sethostname("far" if mesh.ranks.rank == 1 else "near")
        return _own_servers(ParallelLayout.parse("vllm:d4"), mesh.ranks, mesh.device)
    return None


def test_ranks_of_each_machine_start_its_servers_which_listen_to_all_machines(cluster):
    import torch

    servers = cluster.run(placed, "megatron:d3")
    if servers[0] is None:
        pytest.skip("no process may take another host name here")
    place = torch.device("cpu"), "127.0.0.1"
    assert servers == [{0: place}, {2: place, 3: place}, {1: place}]


def test_a_server_sees_its_own_gpus_only(monkeypatch):
    import torch

    from fivefold.engines.servers.server_process import devices_from

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_from(torch.device("cuda", 4), 2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,1,GPU-a,3,0")
    assert devices_from(torch.device("cuda", 2), 2) == {"CUDA_VISIBLE_DEVICES": "GPU-a,3"}
    assert devices_from(torch.device("cpu"), 2) == {}


def test_servers_of_a_judge_come_after_those_of_the_engine():
    machines = [Machine(range(2), 8, range(2)), Machine(range(2, 4), 6, range(2, 4))]
    free = after_servers(machines, ParallelLayout.parse("vllm:d3t2"))
    assert [machine.first for machine in free] == [6, 4]
    judge = place_servers(ParallelLayout.parse("vllm:d2t1"), free)
    assert [(place.machine, place.first_gpu) for place in judge] == [(0, 6), (1, 4)]
    with pytest.raises(ValueError, match="8 GPUs for 2 ranks, 6 GPUs for 2 ranks and 6 for other servers"):
        place_servers(ParallelLayout.parse("vllm:d2t4"), free)


def test_check_says_which_gpus_a_judge_has():
    config = RunConfig.of(
        {
            "model": {"path": "m"},
            "policy": {"backend": "megatron:d2"},
            "engine": {"backend": "vllm:d2t1", "placement": "apart"},
            "data": {"train": ["x.jsonl"]},
            "reward": {"functions": {"judge": 1.0}, "judge": {"model": "j", "backend": "vllm:d1t2"}},
            "launch": {"gpu": "h100-80g"},
        }
    )
    assert [where for where, _ in device_rows(config)] == ["GPU 0-1", "GPU 2", "GPU 3", "GPU 4-5"]
    assert device_rows(config)[-1][1].startswith("judge 0 of vllm:d1t2")
