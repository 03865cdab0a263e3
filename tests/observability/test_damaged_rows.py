"""Rows of another shape than a run writes are named or passed over, whatever reads them: never a traceback."""

from __future__ import annotations

import json
from itertools import product

import pytest

from fivefold.observability.curve import figure, plot
from fivefold.observability.report import write_report
from fivefold.observability.run_view import RunView
from fivefold.observability.watch import frame

SHAPES = [
    None,
    True,
    1,
    10**400,
    -1.5,
    "text",
    [],
    [1],
    {},
    {"a": 1},
    [[1, 2, 3]],
    [{"name": 1}],
    {"requests in flight": [[1]]},
]
KEYS = {
    "metrics.jsonl": ("reward/mean", "wall", "time/step", "policy/loss"),
    "samples.jsonl": (
        "reward",
        "reward_parts",
        "prompt",
        "question",
        "group_rewards",
        "group_lengths",
        "sample",
        "response",
        "kind",
        "finished",
        "response_tokens",
        "group",
        "tokens",
    ),
    "trace/stages.jsonl": ("spans", "curves"),
}
WHOLE = {
    "metrics.jsonl": {"reward/mean": 0.5, "wall": 1.0, "time/step": 1.0},
    "samples.jsonl": {"kind": "train", "prompt": "p", "response": "r", "reward": 1.0},
    "trace/stages.jsonl": {"spans": [{"name": "train", "start": 0.0, "seconds": 1.0}], "curves": {}},
}


@pytest.mark.parametrize("name", KEYS)
def test_rows_of_another_shape_give_no_traceback(tmp_path, name):
    (tmp_path / "trace").mkdir()
    for file_name, row in WHOLE.items():
        (tmp_path / file_name).write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in (1, 2)))
    rows = [{"step": 3, **WHOLE[name], key: shape} for key, shape in product(KEYS[name], SHAPES)]
    with (tmp_path / name).open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    assert '"reward/mean": 0.5' in write_report([tmp_path]).read_text()
    assert "reward/mean" in plot(tmp_path, "reward/mean")
    (tmp_path / "curve.svg").write_text(figure(tmp_path, "reward/mean").svg)
    frame([RunView(tmp_path)], 100, 40)
