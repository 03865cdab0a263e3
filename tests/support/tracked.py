"""Runs that a tracker follows: a process with our logger, and what each tracker's own reader finds afterwards."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
SETTINGS = {
    "project": "sums", "name": "first try", "group": "tries", "tags": ["small", "cpu"], "offline": True, "samples_every": 2,
    "wait_seconds": 60,
}  # fmt: skip
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from fivefold.observability.run_logger import RunLogger
from fivefold.observability.trackers.state import State
root, names, first, last, seconds, killed = sys.argv[1:]
logger = RunLogger(Path(root), ["console", *names.split(",")], True, int(last), tracker_seconds=float(seconds))
logger.begin()
for step in range(int(first), int(last) + 1):
    logger.record({"reward/mean": step / 3 + int(first), "reward/pass@8": step / 7, "policy/loss": float("nan")})
    logger.samples([{"step": step, "kind": "train", "source": "sums", "prompt": "1+1=", "ground_truth": "2", "finished": True,
                     "response": f"<b>{step}</b>\\n|two| \\u2028", "reward": None if step == 2 else 1.0, "response_tokens": 3}])
    logger.end_step(step)
    time.sleep(0.05)
while killed != "no" and any(State.read(Path(root), name).given < int(last) for name in names.split(",")):
    time.sleep(0.05)
if killed == "all":
    import psutil
    for follower in logger._trackers._followers.values():
        process = psutil.Process(follower._pid)
        for each in [*process.children(recursive=True), process]:
            each.kill()
if killed != "no":
    os.kill(os.getpid(), 9)
logger.end("finished", int(last))
logger.close()
"""
"""Takes steps as a trainer does; when its trackers have the last it kills itself where it is told so, or also their processes."""


def take_steps(
    run_dir: Path,
    names: list[str],
    first: int,
    last: int,
    *,
    seconds: float = 60,
    killed: str = "no",
    offline: bool = True,
    tensorboard_dir: str | None = None,
    **environment: str,
) -> str:
    """Run steps `first` to `last` in a process of their own; what it said."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tracking, trainer = SETTINGS | {"offline": offline}, {"tensorboard_dir": tensorboard_dir}
    tree = {"tracking": tracking, "trainer": trainer, "policy": {"optimizer": {"lr": 1e-6}}}
    (run_dir / "run.yaml").write_text(json.dumps(tree))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir), ",".join(names), str(first), str(last), str(seconds),
         killed],
        env={**os.environ, **environment}, cwd=run_dir.parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if killed != "no" else 0), done.stderr
    return done.stdout


def metrics_of(run_dir: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value, as metrics.jsonl has them."""
    metrics: dict[str, dict[int, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name not in ("step", "wall") and value is not None:
                metrics.setdefault(name, {})[row["step"]] = value
    return metrics


def _wandb_records(path: Path) -> Iterator[Any]:
    """The records of a file of LevelDB's log format, whose reader wandb no longer has in Python."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_wandb(run_dir: Path) -> tuple[dict[str, dict[int, float]], dict[str, Any]]:
    """Metrics and what else is known of the run, over all files that it has."""
    metrics: dict[str, dict[int, float]] = {}
    runs, tables = [], []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for record in _wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                runs.append(record.run)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "samples/path" in row:
                tables.append((row["step"], json.loads((path.parent / "files" / row["samples/path"]).read_text())))
                continue
            for name, value in row.items():
                if not name.startswith("_") and name != "step":
                    metrics.setdefault(name, {})[row["step"]] = value
    if not runs:
        return {}, {}
    run = runs[-1]
    return metrics, {"ids": {run.run_id for run in runs}, "project": run.project, "name": run.display_name,
                   "group": run.run_group, "tags": set(run.tags), "tables": tables}  # fmt: skip
