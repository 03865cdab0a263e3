"""GPUs by number, from texts that no one evaluates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold_dialects.device_mapping import parse_devices, ranks_after

TEXTS = [
    "list(range(0,16))",
    "list(range(8))",
    "list(range(0, 8, 2))",
    "list(range(0,4)) + list(range(8,16))",
    "[0, 3]",
    "[5]+list(range(7,9))",
    "[]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_mapping_names_what_python_would_make_of_it(text):
    assert parse_devices(text) == eval(text)


@pytest.mark.parametrize(
    ("given_", "devices"),
    [("0-7", list(range(8))), ("0-1,4,6 - 7", [0, 1, 4, 6, 7]), ("3", [3]), (3, [3]), ([2, 0], [2, 0])],
)
def test_spans_and_lists_are_read_too(given_, devices):
    assert parse_devices(given_) == devices


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').listdir()",
        "list(range(0,8,0))",
        "list(range(99999999999))",
        "0-99999999999",
        "7-0",
        "list(range(-4,0))",
        "[0,1",
        "[0 1]",
        "0..7",
        "",
        None,
        [True],
        [-1],
        ["0"],
        1.5,
    ],
)
def test_anything_else_is_refused_with_what_may_stand_there(text):
    with pytest.raises(ValueError, match=r"must be a sum of list\(range\(a,b\)\) and \[a,b\], or spans like 0-7: got"):
        parse_devices(text)


def test_a_gpu_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="must name each GPU once: got GPU 3 more than once"):
        parse_devices("list(range(0,4)) + [3]")


@given(st.text(alphabet="0123456789 ,-+[]()listrange", max_size=40))
def test_no_text_does_anything_but_be_read_or_refused(text):
    try:
        devices = parse_devices(text)
    except ValueError:
        return
    assert len(devices) == len(set(devices)) and all(number >= 0 for number in devices)


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ({"critic": [4, 5], "reference": [6]}, {"critic": 4, "reference": 6}),
        ({"critic": [6, 7], "reference": [7, 6]}, {"critic": 4, "reference": 4}),
        ({"critic": [0, 1, 2, 3], "reference": [9]}, {"reference": 4}),
        # Half of them are the policy's, the engine's, or the critic's.
        ({"critic": [3, 4], "reference": [5]}, {"reference": 4}),
        ({"critic": [8, 9]}, {}),
        ({"critic": [5, 6], "reference": [6, 7]}, {"critic": 4}),
        ({"critic": []}, {}),
    ],
)
def test_models_on_gpus_of_their_own_come_after_the_policy(others, ranks):
    assert ranks_after([0, 1, 2, 3], [8], others) == ranks
