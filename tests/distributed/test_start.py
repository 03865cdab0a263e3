"""What a start costs on many ranks, counted on one of them: its groups, its calls, its seconds of Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

START = """
import json, sys, time
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

layout, other = sys.argv[1:]
from fivefold.distributed.ranks import Ranks
from fivefold.layout import ParallelLayout
from fivefold.backends import Meshes

parsed = ParallelLayout.parse(layout)
dist.init_process_group("fake", store=FakeStore(), rank=parsed.world_size - 1, world_size=parsed.world_size)
make, made, all_meet = dist.new_group, [], []
def counted(ranks=None, *arguments, **named):
    made.append(len(ranks))
    all_meet.append(not named.get("use_local_synchronization"))
    return make(ranks, *arguments, **named | {"backend": "fake"})
dist.new_group = counted
begin = time.perf_counter()
meshes = Meshes(Ranks(parsed, timeout_minutes=10), torch.device("cpu"), 0, 10)
seconds, own = time.perf_counter() - begin, list(made)
for model in ("reference", "critic"):
    meshes.of(ParallelLayout.parse(other.replace(":", f"[{model}]:")))
others = made[len(own):]
print(json.dumps({"made": own, "others": others, "all_meet": sum(all_meet), "seconds": seconds}))
"""


def start(layout: str, other: str) -> dict:
    """Of the policy's layout, and of another one that two models have."""
    done = subprocess.run(
        [sys.executable, "-c", START, f"megatron:{layout}", f"megatron:{other}"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("few", "many"), [(("d2t4p4c2e4", "d64e4"), ("d32t4p4c2e4", "d1024e4")), (("d8", "d2t2p2"), ("d1024", "d256t2p2"))]
)
def test_groups_that_a_rank_makes_follow_the_dimensions_and_not_the_number_of_ranks(few, many):
    """Megatron-Core alone would make 3,133 groups at d32t4p4c2e8, and let all 1,024 ranks meet at each."""
    small, large = start(*few), start(*many)
    assert len(large["made"]) == len(small["made"]) <= 20
    # Once for both models, and without another group of all ranks for the host.
    assert len(large["others"]) == len(small["others"]) < 20
    assert large["all_meet"] == 0
    assert large["made"].count(1) <= 2
    # 0.2 s seen; a list of all ranks for each of them takes a hundred times that.
    assert large["seconds"] < 3
