from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.layout import ParallelLayout

sizes = st.integers(1, 16)


@given(sizes, sizes, sizes)
def test_a_layout_reads_back_what_it_prints(d, t, p):
    layout = ParallelLayout("megatron", dp=d, tp=t, pp=p)
    assert ParallelLayout.parse(str(layout)) == layout
    assert layout.world_size == d * t * p


@given(sizes, sizes, sizes)
def test_every_rank_has_a_place_of_its_own(d, t, p):
    layout = ParallelLayout("megatron", dp=d, tp=t, pp=p)
    places = {layout.coordinates(rank) for rank in range(layout.world_size)}
    assert len(places) == layout.world_size


@pytest.mark.parametrize("text", ["megatron:t2d4", "megatron:d4t2", " megatron : d4 t2 ", "'megatron:d4t2'"])
def test_order_spaces_and_quotes_do_not_matter(text):
    assert ParallelLayout.parse(text) == ParallelLayout("megatron", dp=4, tp=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("d4", "names its backend"),
        ("megatron:", "names no dimension"),
        ("MEGATRON:d4", "unknown backend 'MEGATRON'"),
        ("deepspeed:d4", "known: megatron"),
        ("megatron:d4d2", "given twice"),
        ("megatron:d0", "start at 1"),
        ("megatron:d04", "no leading zero"),
        ("megatron:x2", "unknown dimension 'x'"),
        ("megatron:d2-t2", "cannot read '-t2'"),
        ("megatron:2d", "cannot read '2d'"),
        ("megatron:d", "cannot read 'd'"),
        ("", "names its backend"),
    ],
)
def test_a_bad_layout_is_refused_with_what_would_be_right(text, says):
    with pytest.raises(ValueError, match=says):
        ParallelLayout.parse(text)


@given(st.text(alphabet="megatron:dtpx0123456789() |,'", max_size=24))
def test_no_text_does_anything_but_parse_or_be_refused(text):
    try:
        layout = ParallelLayout.parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert ParallelLayout.parse(str(layout)) == layout
