"""A run directory as it is now: metrics, samples, stages and state of a running or ended run. No torch here.

`report` and `watch` use it. A row that the run is still writing is left for the next refresh.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.observability.differences import settings
from fivefold.observability.distributions import Drawn
from fivefold.observability.growing import GrowingRows, is_number, numbers
from fivefold.observability.warnings import WARNINGS

_MOST_SAMPLES = 2000
_MOST_TRANSCRIPTS = 50
_MOST_STAGES = 32
_SILENT = 120.0
"""Seconds without new metrics after which a run on another machine is considered dead; more if its steps are longer."""
_LATEST = 20
"""Number of latest steps from which the time of the next ones is estimated."""


def _is_run(path: Path) -> bool:
    """Return whether the directory has one of the first files that a run writes."""
    return any((path / name).is_file() for name in ("status.json", "run.yaml", "metrics.jsonl"))


class RunView:
    """Contents of a run directory; `refresh` reads what is new."""

    def __init__(self, run_dir: Path) -> None:
        """Raise ValueError if there is no such directory, or if it is not a run's."""
        if not run_dir.is_dir():
            raise UserError(f"{run_dir} must be the directory of a run: there is none")
        if not _is_run(run_dir) and (runs := sorted(filter(_is_run, run_dir.iterdir()))):
            raise UserError(f"{run_dir} must be the directory of a run: those in it are {', '.join(map(str, runs[:5]))}")
        self.run_dir = run_dir
        self.rows: list[dict[str, Any]] = []
        """Rows of metrics.jsonl, in the order in which they were written."""
        self.samples: deque[dict[str, Any]] = deque(maxlen=_MOST_SAMPLES)
        self.transcripts: deque[dict[str, Any]] = deque(maxlen=_MOST_TRANSCRIPTS)
        """Latest rows of transcripts.jsonl."""
        self.distributions = Drawn()
        self.stages: deque[dict[str, Any]] = deque(maxlen=_MOST_STAGES)
        self.dropped = 0
        """Number of samples before the first that is kept."""
        self.generation = 0
        """Counter that changes when earlier rows become void, because the run resumed from an older step."""
        self._files = [GrowingRows(run_dir / name) for name in ("metrics.jsonl", "samples.jsonl", "trace/stages.jsonl")]
        self._warnings, self._warned = GrowingRows(run_dir / WARNINGS), list[dict[str, Any]]()
        self._transcripts = GrowingRows(run_dir / "transcripts.jsonl")
        self._status: dict[str, Any] = {}
        self.refresh()

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    def refresh(self) -> None:
        """Read what is new; skip damaged lines."""
        metrics, samples, stages = self._files
        rows, is_void = metrics.new()
        drawn, are_void = samples.new()
        times, were_void = stages.new()
        if is_void or are_void:
            # Samples and metrics are shown together, so both are read again from the start.
            self.rows, self.dropped = [], 0
            self.samples.clear()
            self.distributions = Drawn()
            self.generation += 1
            self._files[:2] = [GrowingRows(self.run_dir / name) for name in ("metrics.jsonl", "samples.jsonl")]
            rows, drawn = self._files[0].new()[0], self._files[1].new()[0]
        if were_void:
            self.stages.clear()
        self.rows += [numbers(row) for row in rows]
        self.dropped += max(0, len(self.samples) + len(drawn) - _MOST_SAMPLES)
        self.samples.extend(drawn)
        for row in drawn:
            self.distributions.add(row)
        self.stages.extend(row for row in times if _is_timed(row))
        transcripts, is_moved = self._transcripts.new()
        if is_moved:
            self.transcripts.clear()
        self.transcripts.extend(transcripts)
        # Only the warnings of the latest step are shown.
        warned, is_moved = self._warnings.new()
        if warned or is_moved:
            self._warned = [row for row in warned if row["step"] == warned[-1]["step"]]
        self._status = _read(self.run_dir / "status.json")

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def warnings(self) -> list[str]:
        """Return what is wrong in the latest step; empty if its metrics reach no threshold of `trainer.warnings`."""
        return [str(row.get("text", "")) for row in self._warned if row["step"] == self.step]

    @property
    def config(self) -> str:
        """Return the text of run.yaml."""
        try:
            return (self.run_dir / "run.yaml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    @property
    def total(self) -> int | None:
        """Return the planned number of steps; None if no file has it."""
        if isinstance(planned := self._status.get("steps"), int):
            return planned
        trainer = settings(self.config).get("trainer")
        steps = trainer.get("steps") if isinstance(trainer, dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def state(self) -> str:
        """Return the state: running, finished, ended, failed, dead or over.

        `ended` is by request, `dead` is without an exit status, and `over` means that nothing more is known.
        """
        state = self._status.get("state")
        if state in ("finished", "ended", "failed"):
            return str(state)
        if _is_locked(self.run_dir / "lock"):
            return "running"
        if state is None:
            return "finished" if self.total is not None and self.step >= self.total else "over"
        is_recent = time.time() - self.last_word < max(_SILENT, 10 * (self.seconds_per_step or 0))
        return "running" if is_recent and not _is_here(self.run_dir / "lock") else "dead"

    @property
    def reason(self) -> str:
        """Return why the run ended, as far as its files show."""
        for path in sorted((self.run_dir / "logs").glob("rank-*.error")):
            try:
                lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            except OSError:
                continue
            if lines:
                return lines[-1]
        return ""

    @property
    def last_word(self) -> float:
        """Return when the run last wrote metrics, by time.time(); 0 if never."""
        return float(self.rows[-1].get("wall") or 0) if self.rows else 0.0

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean seconds of the latest steps, with the time between them; None without two steps."""
        last = [row for row in self.rows[-_LATEST:] if row.get("wall")]
        if len(last) < 2 or last[-1]["step"] <= last[0]["step"]:
            return None
        return max(0.0, float(last[-1]["wall"] - last[0]["wall"])) / int(last[-1]["step"] - last[0]["step"])

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the last step, estimated from the latest steps; None if unknown."""
        if self.state != "running" or self.total is None or self.seconds_per_step is None:
            return None
        return max(0, self.total - self.step) * self.seconds_per_step

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the (step, value) pairs of a metric, without steps that lack it."""
        return [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]

    @property
    def stage_names(self) -> list[str]:
        """Return the names of the stages in all rows."""
        return sorted({name[5:] for row in self.rows for name in row if name.startswith("time/") and name != "time/step"})

    def stage_seconds(self) -> dict[str, float]:
        """Return stage -> total seconds over the latest steps, the longest first; `step` is all of them."""
        seconds: dict[str, float] = {}
        for row in self.rows[-_LATEST:]:
            for name, value in row.items():
                if name.startswith("time/") and value is not None:
                    seconds[name[5:]] = seconds.get(name[5:], 0.0) + value
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _is_timed(row: dict[str, Any]) -> bool:
    """Return whether a row of trace/stages.jsonl has what a timeline needs."""
    spans, curves = row.get("spans"), row.get("curves", {})
    return (
        isinstance(spans, list)
        and isinstance(curves, dict)
        and all(isinstance(span, dict) and isinstance(span.get("name"), str) for span in spans)
        and all(is_number(span.get(key)) for span in spans for key in ("start", "seconds"))
        and all(isinstance(points, list) for points in curves.values())
        and all(
            isinstance(point, list) and len(point) == 2 and all(map(is_number, point))
            for points in curves.values()
            for point in points
        )
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_here(path: Path) -> bool:
    """Return whether the last run in this directory ran on this machine, whose locks are visible here."""
    try:
        return f" on {os.uname().nodename} " in path.read_text(errors="replace")
    except OSError:
        return False


def _is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds the lock on a file.

    Taking the lock to test it could stop a run that starts at the same time.
    """
    try:
        status = path.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(wanted in line.split() for line in locks.splitlines())
