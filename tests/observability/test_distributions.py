"""Histograms count every logged number once, in a bin that holds it."""

from __future__ import annotations

import json
import random

import pytest

from fivefold.observability.distributions import Drawn, histograms
from fivefold.observability.run_logger import append_json
from fivefold.observability.run_view import RunView


def drawn(rows):
    numbers = Drawn()
    for row in rows:
        numbers.add({"kind": "train", **row})
    return numbers


def total(run):
    return sum(sum(stretch["counts"]) for stretch in run)


def test_all_samples_of_a_logged_group_are_counted_once():
    first = {"step": 1, "sample": 0, "group_rewards": [1.0, 0.0, None, 1.0], "group_lengths": [5, 6, 7, 900],
             "reward": 1.0, "response_tokens": 5}  # fmt: skip
    others = [{"step": 1, "sample": number, "reward": 1.0, "response_tokens": 9} for number in (1, 2, 3)]
    shown = histograms([drawn([first, *others])])
    assert shown["reward"] == {"bins": [(0.0, 0.0), (1.0, 1.0)], "runs": [[{"from": 1, "to": 1, "counts": [1, 2]}]]}
    assert total(shown["length"]["runs"][0]) == 4


def test_rows_without_numbers_of_their_group_count_as_one_sample():
    shown = histograms([drawn([{"step": 1, "reward": 0.5, "response_tokens": 3}, {"step": 2, "reward": None}])])
    assert shown["reward"]["bins"] == [(0.5, 0.5)] and total(shown["reward"]["runs"][0]) == 1
    assert shown["length"]["runs"][0] == [{"from": 1, "to": 1, "counts": [1]}, {"from": 2, "to": 2, "counts": [0]}]


def test_samples_of_evaluations_are_left_out():
    assert histograms([drawn([{"step": 1, "kind": "val", "reward": 1.0, "response_tokens": 3}])]) == {}


@pytest.mark.parametrize("draw", [lambda r: r.gauss(0, 3), lambda r: r.randrange(7, 4000), lambda r: r.random() * 1e-7,
                                  lambda r: -r.random() * 1e9, lambda r: r.choice([-1.0, 0.1, 1.0])])  # fmt: skip
def test_every_number_is_in_the_bin_that_holds_it(draw):
    source = random.Random(3)
    values = [draw(source) for _ in range(500)]
    rows = [{"step": step, "reward": value, "response_tokens": 1} for step, value in enumerate(values)]
    shown = histograms([drawn(rows[:300]), drawn(rows[300:])])["reward"]
    bins, is_whole = shown["bins"], all(isinstance(value, int) for value in values)
    assert 1 <= len(bins) <= 26 and [total(run) for run in shown["runs"]] == [300, 200]
    counts = [sum(stretch["counts"][place] for run in shown["runs"] for stretch in run) for place in range(len(bins))]
    for (low, high), count in zip(bins, counts, strict=True):
        rounding = 1e-9 * abs(high - low)
        assert count == pytest.approx(
            sum(low - rounding <= value <= high + rounding for value in values)
            if is_whole or low == high
            else sum(low - rounding <= value < high - rounding for value in values),
            abs=1,
        )


def test_stretches_cover_all_steps_in_order():
    rows = [{"step": step, "reward": step % 2, "response_tokens": 1} for step in range(0, 1000, 7)]
    (run,) = histograms([drawn(rows)])["reward"]["runs"]
    assert 15 <= len(run) <= 20 and run[0]["from"] == 0 and run[-1]["to"] == 994
    assert all(sum(stretch["counts"]) == (stretch["to"] - stretch["from"]) / 7 + 1 for stretch in run)


def test_a_resumed_run_counts_its_repeated_steps_once(tmp_path):
    def write(*steps):
        for step in steps:
            append_json(tmp_path / "metrics.jsonl", {"step": step})
            append_json(tmp_path / "samples.jsonl", {"step": step, "kind": "train", "reward": 1.0, "response_tokens": 2})

    write(1, 2, 3)
    view = RunView(tmp_path)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()[:1]
    (tmp_path / "samples.jsonl").rename(tmp_path / "aside")
    (tmp_path / "samples.jsonl").write_text("".join(line + "\n" for line in lines))
    write(2)
    view.refresh()
    assert list(view.distributions.steps) == [1, 2]
    assert json.dumps(histograms([view.distributions]))
