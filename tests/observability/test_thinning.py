"""Curves of long runs are thinned: a page stays small, and no spike is lost."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from fivefold.observability.metrics import METRICS
from fivefold.observability.report import news, write_report
from fivefold.observability.run_view import RunView
from fivefold.observability.thinning import thin


def test_the_first_last_least_and_greatest_of_every_stretch_are_kept():
    draw = random.Random(5)
    rows = [{"step": step, "a": draw.random(), "time/train": 0.5} for step in range(10_000)]
    for step in range(0, 10_000, 7):
        rows[step]["rare"] = draw.random()
    rows[4321]["a"], rows[7654]["a"], rows[7000]["rare"] = 1e6, -1e6, None
    thinned, seconds = thin(rows, 2_000)
    assert sum(len(row) - 1 for row in thinned) <= 2_000
    for name in ("a", "rare"):
        before = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        after = [(row["step"], row[name]) for row in thinned if name in row]
        assert [step for step, _ in after] == sorted({step for step, _ in after})
        assert set(after) <= {(step, float(f"{value:.6g}")) for step, value in before}
        for choose in (min, max):
            assert choose(value for _, value in after) == pytest.approx(choose(value for _, value in before), rel=1e-5)
        assert (after[0][0], after[-1][0]) == (before[0][0], before[-1][0])
        largest_gap = max(later - step for (step, _), (later, _) in pairwise(after))
        assert largest_gap < 10_000 / len(after) * 8
    assert sum(row["time/train"] for row in seconds) == 5_000, "shares of stages are those of all steps"
    assert thin(rows[:50], 2_000) == (rows[:50], [])


def test_every_row_that_is_kept_has_its_time_to_the_tenth_of_a_second():
    rows = [{"step": step, "wall": 1.76e9 + 0.26 * step, "a": step % 7, "time/train": 0.5} for step in range(10_000)]
    thinned, seconds = thin(rows, 500)
    assert len(thinned) < 600
    for row in [*thinned, *seconds]:
        assert row["wall"] == pytest.approx(1.76e9 + 0.26 * row["step"], abs=0.051, rel=0)


@pytest.mark.slow
def test_the_page_of_a_run_of_20000_steps_is_at_most_5_mb(tmp_path):
    draw = random.Random(5)
    named = [metric.name for section in METRICS.values() for metric in section]
    names = [name.replace("<", "").replace(">", "") for name in named][:110]
    assert len(names) > 90
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "wall": 1e9 + step, **{name: draw.gauss(0, 1) for name in names}}) + "\n")
    with (tmp_path / "samples.jsonl").open("w") as file:
        for step in range(19_000, 20_000):
            file.write(json.dumps({"step": step, "kind": "train", "prompt": "<p>" * 500, "response": "r" * 8_000}) + "\n")
    assert 10**6 < write_report([tmp_path]).stat().st_size < 5 * 10**6
    (run,) = news([RunView(tmp_path)], [])["runs"]
    assert run["rows_end"] == 20_000 and run["rows"][-1]["step"] == 20_000
    assert run["thinned"]["rows"] == len(run["rows"])
    # What comes later comes whole.
    (again,) = news([RunView(tmp_path)], [(0, 19_990, 0)])["runs"]
    assert len(again["rows"]) == 10 and "thinned" not in again
