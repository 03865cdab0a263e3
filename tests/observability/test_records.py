"""Files of one JSON object a line: a line ends at a newline and nowhere else, for every writer and reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint.checkpoints import Checkpoints
from fivefold.data.prepare import prepare
from fivefold.data.rows import read_rows
from fivefold.observability.curve import load_metrics, plot
from fivefold.observability.report import write_report
from fivefold.observability.run_logger import append_json

BREAKS = "a\u2028b\u2029c\u0085d\re\vf\fg\x1ch"
"""Every character but newline at which Python's splitlines ends a line."""


def sample(step: int, **changes: object) -> dict[str, object]:
    return {"step": step, "kind": "train", "prompt": "1+1=", "response": BREAKS, "ground_truth": "2", "reward": 1.0,
            "response_tokens": 5, **changes}  # fmt: skip


def shown(page: str) -> dict[str, Any]:
    """What the script of a page with one run is given."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    (run,) = json.loads(match[1])["runs"]
    return dict(run)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        append_json(tmp_path / "metrics.jsonl", {"step": step, "reward/mean": step / 4, "wall": 60.0 * step})
        append_json(tmp_path / "samples.jsonl", sample(step))
    return tmp_path


def test_a_response_of_line_breaks_is_reported_whole_and_survives_a_resume(run):
    page = write_report([run]).read_text(encoding="utf-8")
    assert [row["response"] for row in shown(page)["samples"]] == [BREAKS] * 3
    Checkpoints(run, keep=1).set_aside(2)
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["response"] == BREAKS


def test_data_files_with_line_breaks_in_texts_are_read_whole(tmp_path):
    source = tmp_path / "train.jsonl"
    rows = [{"question": f"{n}{BREAKS}", "answer": f"so #### {n}"} for n in range(40)]
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n")
    assert [row["question"] for row in read_rows(source)] == [row["question"] for row in rows]
    assert prepare("gsm8k", tmp_path / "out", [source]) == {"train": 38, "test": 2}
    assert next(read_rows(tmp_path / "out/train.parquet"))["prompt"][0]["content"].startswith(f"0{BREAKS}")


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_report_of_a_running_run_leaves_out_its_unfinished_line(run, cut):
    for name, row in (("metrics.jsonl", {"step": 4, "reward/mean": 9.0}), ("samples.jsonl", sample(4, response="x" * 90))):
        line = json.dumps(row)[:cut]
        with (run / name).open("a") as file:
            file.write(line)
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert [row["step"] for row in load_metrics(run)] == [1, 2, 3]
    write_report([run])
    plot(run, "reward/mean")
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "samples.jsonl", "report.html"}


def test_values_that_are_null_are_left_out_of_a_report(run):
    append_json(run / "metrics.jsonl", {"step": 4, "reward/mean": float("nan"), "policy/loss": None, "wall": None})
    append_json(run / "samples.jsonl", sample(4, reward=None, ground_truth=None, response=None))
    page = write_report([run]).read_text(encoding="utf-8")
    assert shown(page)["samples"][-1]["reward"] is None and shown(page)["step"] == 4
    assert shown(page)["rows"][-1] == {"step": 4, "reward/mean": None, "policy/loss": None, "wall": None}


def test_a_damaged_line_within_a_file_is_named(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4,\n{"step": 5}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 4 is not JSON"):
        write_report([run])


def test_a_report_shows_what_the_trainer_did_above_what_the_engine_had(run):
    """Of the steps since the run was resumed: its clock began again then."""
    (run / "trace").mkdir()
    for step, start in ((1, 50.0), (2, 0.0), (3, 10.0)):
        spans = [{"name": name, "start": start + at, "seconds": 2.0} for at, name in enumerate(("rollout", "train", "step"))]
        curves = {"requests in flight": [[start, 7], [start + 2, 3]]}
        append_json(run / "trace/stages.jsonl", {"step": step, "spans": spans, "curves": curves})
    lanes = shown(write_report([run]).read_text(encoding="utf-8"))["timeline"]
    assert lanes["steps"] == [2, 3] and lanes["seconds"] == 14
    assert [stage for stage in lanes["stages"] if stage[0] == "train"] == [["train", 1, 2], ["train", 11, 2]]
    assert lanes["in_flight"] == [[0, 7], [2, 3], [10, 7], [12, 3]]
