from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.layout import Allocation, ParallelLayout

sizes = st.integers(1, 16)
names = st.none() | st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True)


@st.composite
def layouts(draw):
    """Layouts whose experts divide the ranks of a stage."""
    dp, tp, pp, cp = (draw(sizes) for _ in range(4))
    stage = dp * tp * cp
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    return ParallelLayout("megatron", dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, name=draw(names))


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_a_layout_reads_back_what_it_prints(layout):
    assert ParallelLayout.parse(str(layout)) == layout
    assert layout.world_size == layout.edp * layout.ep * layout.etp * layout.pp


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_every_rank_has_a_place_of_its_own_among_attention_and_among_experts(dp, tp, pp, cp, data):
    stage = dp * tp * cp
    ep = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    layout = ParallelLayout("megatron", dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({(p.dp, p.tp, p.pp, p.cp) for p in places}) == layout.world_size
    assert len({(p.edp, p.etp, p.ep, p.pp) for p in places}) == layout.world_size


SAME = ParallelLayout("megatron", dp=1, tp=2, pp=4, cp=2, ep=4)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("megatron:t2d4", ParallelLayout(dp=4, tp=2)),
        (" megatron : d4 t2 ", ParallelLayout(dp=4, tp=2)),
        ("'megatron:d4t2'", ParallelLayout(dp=4, tp=2)),
        ("fsdp:d4", ParallelLayout("fsdp", dp=4)),
        ("megatron[actor]:d4t2p2", ParallelLayout(dp=4, tp=2, pp=2, name="actor")),
        ("megatron:d2p2t4c2e4", ParallelLayout(dp=2, pp=2, tp=4, cp=2, ep=4)),
        ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", SAME),
        ("megatron:attn:d1p4t2c2|ffn:d1p4t1e4", SAME),
        ("'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)'", SAME),
        ("megatron:'(attn:d1p4t2c2|ffn:d1p4t1e4)'", SAME),
        ("megatron:(attn:p4t2c2|ffn:e4)", SAME),
        ("megatron[a]:(attn:d4t2|ffn:t2e2)", ParallelLayout(dp=4, tp=2, ep=2, etp=2, name="a")),
        ("fsdp:d2t2", ParallelLayout("fsdp", dp=2, tp=2)),
        ("fsdp:d4c2", ParallelLayout("fsdp", dp=4, cp=2)),
        ("fsdp:d8e4", ParallelLayout("fsdp", dp=8, ep=4)),
        ("fsdp:(attn:d4t2|ffn:e4)", ParallelLayout("fsdp", dp=4, tp=2, ep=4)),
        ("sglang:d4t4", ParallelLayout("sglang", dp=4, tp=4)),
    ],
)
def test_what_a_layout_string_means(text, layout):
    assert ParallelLayout.parse(text) == layout


def test_the_published_example_lies_on_sixteen_ranks():
    layout = ParallelLayout.parse("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)")
    assert (layout.world_size, layout.edp, layout.etp) == (16, 1, 1)
    assert ParallelLayout.parse("megatron:d2p2t4e4").edp == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("d4", "names its backend"),
        ("[actor]:d4", "names its backend"),
        ("megatron:", "names no dimension"),
        ("MEGATRON:d4", "unknown backend 'MEGATRON'.*did you mean 'megatron'"),
        ("deepspeed:d4", "known: megatron, fsdp"),
        ("sglang.d4", "colon after its backend, not a dot"),
        ("megatron:d4d2", "given twice"),
        ("megatron:d0", "start at 1"),
        ("megatron:d04", "no leading zero"),
        ("megatron:x2", "unknown dimension 'x'"),
        ("megatron:d2-t2", "cannot read '-t2'"),
        ("megatron:2d", "cannot read '2d'"),
        ("megatron:d", "cannot read 'd'"),
        ("megatron:d99999999", "at most"),
        ("megatron[1a]:d4", "name in brackets"),
        ("", "names its backend"),
        ("fsdp:p2", "no pipeline: got p2; use megatron:"),
        ("fsdp:(attn:d2t2|ffn:d2t2)", "t in an ffn part must be 1"),
        ("fsdp:d2t2e1e", "cannot read"),
        ("fsdp:d6e4", "multiple of t that divides d·t: got e4 for d6 t1"),
        ("fsdp:d4t4e2", "multiple of t that divides d·t: got e2 for d4 t4"),
        ("sglang:d4c2", "unknown dimension 'c'.*valid here: d"),
        ("vllm:attn:d2|ffn:d2", "no attn and ffn"),
        ("megatron:t3e2", "choose an e that divides 3"),
        ("megatron:(attn:d1p4t2c2|ffn:d2p4e4)", "same ranks: attn .* = 16, ffn .* = 32"),
        ("megatron:(attn:d1p4t2c2|ffn:p2e4)", "p must be the same"),
        ("megatron:(attn:d1p4t2c2|ffn:e3)", "not a multiple"),
        ("megatron:(attn:d2e2|ffn:d2)", "unknown dimension 'e'"),
        ("megatron:(attn:d2|ffn:c2)", "unknown dimension 'c'"),
        ("megatron:(attn:d2)", r"written \(attn"),
        ("megatron:(ffn:d2|attn:d2)", r"written \(attn"),
        ("megatron:(attn:d2|ffn:d2", r"written \(attn|cannot read"),
        ("megatron:d4+megatron:d4", "cannot read"),
    ],
)
def test_a_bad_layout_is_refused_with_what_would_be_right(text, says):
    with pytest.raises(ValueError, match=says):
        ParallelLayout.parse(text)


@settings(max_examples=4_000, deadline=None)
@given(
    st.text(alphabet="megatronfsdp:dtpce0123456789() |,'[]+.", max_size=28)
    | st.from_regex(
        r"(megatron|fsdp|vllm)(\[a\])?:\(?(attn:)?([dtpce][0-9]{1,2}){0,5}(\|ffn:([dtpe][1-9]){0,4})?\)?", fullmatch=True
    )
)
def test_no_text_does_anything_but_parse_or_be_refused(text):
    for parse in (ParallelLayout.parse, Allocation.parse):
        try:
            layout = parse(text)
        except ValueError as error:
            assert str(error)
        else:
            assert parse(str(layout)) == layout


def test_layouts_side_by_side_and_on_the_same_ranks():
    allocation = Allocation.parse("sglang[r]:d2t2 | megatron[a]:attn:d2t2|ffn:e2 + fsdp[c]:d2")
    assert [layout.backend for layout in allocation.layouts] == ["sglang", "megatron", "fsdp"]
    assert allocation.world_size == 6
    assert Allocation.parse("sglang:d4t2+megatron:d8").world_size == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sglang:d4|fsdp:d4", "needs a name"),
        ("sglang:d4|fsdp[a]:d2", "world sizes must be equal"),
        ("sglang:d4+fsdp:d4+fsdp:d2", "three or more"),
        ("sglang[a]:d4+fsdp[a]:d4", "'a' is given twice"),
        ("sglang:d4+eval", "names its backend"),
        ("sglang:d4+", "names its backend"),
    ],
)
def test_a_bad_allocation_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Allocation.parse(text)
