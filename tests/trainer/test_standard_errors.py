"""Standard errors of an evaluation, against their definition over prompts."""

from __future__ import annotations

import statistics

import pytest
import torch

from fivefold.trainer.evaluation import _Rows

CORRECT = [[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]]


def rows(correct: list[list[int]], failed: list[list[int]]) -> _Rows:
    correct_N, failed_N = (torch.tensor(numbers, dtype=torch.float64).view(-1) for numbers in (correct, failed))
    nothing_N = torch.zeros_like(correct_N)
    return _Rows(correct_N, nothing_N, nothing_N, failed_N, nothing_N, nothing_N)


def test_the_error_of_mean_at_k_takes_a_prompt_s_responses_as_one_observation():
    means = [statistics.mean(shares) for shares in CORRECT]
    expected = statistics.stdev(means) / len(means) ** 0.5
    assert rows(CORRECT, [[0] * 4] * 5).standard_error(4, "e") == pytest.approx({"e": expected})
    pooled = [share for shares in CORRECT for share in shares]
    assert abs(expected - statistics.stdev(pooled) / len(pooled) ** 0.5) > 0.05


def test_the_error_leaves_out_prompts_with_an_unknown_reward():
    failed = [[0] * 4, [0, 1, 0, 0], *[[0] * 4] * 3]
    means = [statistics.mean(shares) for place, shares in enumerate(CORRECT) if place != 1]
    assert rows(CORRECT, failed).standard_error(4, "e") == pytest.approx({"e": statistics.stdev(means) / 2})


def test_there_is_no_error_of_one_prompt():
    assert rows(CORRECT[:1], [[0] * 4]).standard_error(4, "e") == {}
