"""Which rank holds what, of models on layouts of their own."""

from __future__ import annotations

from fivefold.layout import ParallelLayout
from fivefold.plan.placement import Placed, placement


def of(name: str, layout: str, first_rank: int = 0) -> Placed:
    return Placed(name, ParallelLayout.parse(layout), first_rank)


def test_each_rank_has_a_row_with_its_place_in_each_layout():
    lines = placement([of("policy", "megatron:d2t2"), of("critic", "megatron[critic]:d2t2"), of("reference", "megatron:p4")])
    assert lines == [
        "rank  policy, critic  reference",
        "0     d0 t0           p0",
        "1     d0 t1           p1",
        "2     d1 t0           p2",
        "3     d1 t1           p3",
    ]
    assert placement([of("policy", "megatron:d1")]) == ["rank  policy", "0     whole"]


def test_layouts_with_ranks_of_their_own_stand_in_rows_of_their_own():
    assert placement([of("policy", "megatron:d2"), of("engine", "vllm:t2", 2), of("judge", "vllm:d1", 4)]) == [
        "rank  policy  engine  judge",
        "0     d0      -       -",
        "1     d1      -       -",
        "2     -       t0      -",
        "3     -       t1      -",
        "4     -       -       whole",
    ]


def test_many_ranks_share_rows_and_no_row_says_more_than_it_holds():
    lines = placement([of("policy", "megatron:d32t4p4"), of("reference", "megatron:(attn:d512|ffn:t2e4)")])
    assert len(lines) == 17
    assert lines[1] == "0-31     d0-7 t0-3 p0    d0-31 e0-3 et0-1"
    assert lines[-1] == "480-511  d24-31 t0-3 p3  d480-511 e0-3 et0-1"
    # Two ranks of three a replica: what is shown is what is there, also where it is no range.
    assert of("policy", "megatron:d4p2").cell([3, 4]) == "d0,3 p0-1"
    assert of("policy", "megatron:d4").describe() == "policy megatron:d4t1p1 on ranks 0-3"
