"""Numbers of responses as text, and how often garbage is collected while an engine samples."""

from __future__ import annotations

import gc
from array import array

import pytest

from fivefold.engines.garbage import collected_seldom
from fivefold.engines.vllm.numbers import as_text, from_text


@pytest.mark.parametrize(
    ("kind", "numbers"), [("i", [0, 151935, -1, 2**31 - 1]), ("f", [-0.0, -1e-38, -12.5, float("-inf"), 0.1]), ("f", [])]
)
def test_numbers_in_an_answer_keep_every_bit(kind, numbers):
    sent = array(kind, numbers)
    assert array(kind, from_text(as_text(sent), kind)).tobytes() == sent.tobytes()


def test_a_rank_collects_garbage_as_before_once_it_has_sampled():
    before = gc.get_threshold()
    with collected_seldom():
        assert gc.get_threshold()[0] == 50_000
    assert gc.get_threshold() == before
