"""The check of a page's settings: a report that says "no effect" of a run that differs does not pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.documents.pages import check_change, translated

KEY = "trainer.policy.megatron_config.ddp_config.average_in_collective"


def test_a_reason_for_no_effect_in_a_report_of_a_run_that_differs_fails():
    before, after = translated("skyrl"), translated("skyrl", KEY)
    policy = {**after.tree["policy"], "recompute": "selective"}
    differs = replace(after, tree={**after.tree, "policy": policy})
    with pytest.raises(AssertionError, match=r"the run differs|take it off"):
        check_change("skyrl", KEY, lambda flipped: differs if flipped else before)
    with pytest.raises(AssertionError, match="the run differs"):
        check_change("areal", KEY, lambda flipped: differs if flipped else before)


def test_a_change_that_only_refuses_the_run_shows_nothing():
    before, after = translated("skyrl"), replace(translated("skyrl", KEY), faults=["8 GPUs cannot be divided"])
    with pytest.raises(AssertionError, match="choose another value"):
        check_change("skyrl", KEY, lambda flipped: after if flipped else before)
