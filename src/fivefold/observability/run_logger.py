"""Stages, metrics and samples of a run -> console, metrics.jsonl, samples.jsonl, trace, trackers."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fivefold.config.roles import LEARNERS
from fivefold.distributed.pulse import Stages
from fivefold.files import write_whole, writing
from fivefold.observability.metrics import labelled
from fivefold.observability.start_up import start_up
from fivefold.observability.trackers.trackers import Trackers
from fivefold.observability.warnings import WARNINGS, Warnings
from fivefold.terminal import plain, raw

LINE = {
    "reward/mean": "reward",
    "policy/loss": "loss",
    "policy/grad_norm": "grad norm",
    "policy/entropy": "entropy",
    "policy/kl_reference": "kl",
    **{name: f"{model} {label}" for model in LEARNERS for name, label in labelled(model).items()},
    "response/length_mean": "length",
    "rollout/logprob_diff_mean": "engine diff",
}
"""Metrics in the console line of each step -> their names there."""


LEVELS = ("quiet", "normal", "debug")
"""Values of `trainer.verbosity`, each with more lines than the one before."""
_SHOWN_PART = 0.05
"""Seconds below which a part of the start is left out of its line."""
_SHORTEST = 2e-4
"""Seconds below which a stage is left out of the metrics."""


class RunLogger:
    """Writes files and console output on rank 0; measures time only on other ranks."""

    def __init__(
        self,
        run_dir: Path,
        loggers: list[str],
        is_main: bool,
        steps: int,
        settle: Callable[[], None] = lambda: None,
        tracker_seconds: float = 30.0,
        stages: Stages | None = None,
        warnings: Warnings | None = None,
        verbosity: Literal["quiet", "normal", "debug"] = "normal",
        log_file: str | None = None,
    ) -> None:
        """Create the logger.

        `settle` waits until the device has finished its work, so that no stage's time includes another's. `tracker_seconds`
        is the longest time that the end of the run waits for trackers. `stages` are the stages as other threads read them.
        `verbosity` and `log_file` are the keys of `trainer`.
        """
        self._stages, self.warnings = stages or Stages(), warnings or Warnings()
        self._settle, self._main, self._run_dir = settle, is_main, run_dir
        self._times: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._console = Console(file=raw(sys.stdout), quiet=not (is_main and "console" in loggers), highlight=False)
        self._verbosity = verbosity
        self._log_file = run_dir / "logs" / log_file if log_file is not None and is_main else None
        self._tracker_names = [name for name in loggers if name != "console"]
        self._trackers: Trackers | None = None
        self._tracker_seconds, self._has_begun = tracker_seconds, False
        self._steps, self._state = steps, "running"
        self._progress: Progress | None = None
        self._start = time.time()
        self._spans: list[dict[str, Any]] = []
        self._curves: dict[str, list[tuple[float, float]]] = {}
        self._inner: list[float] = []
        """Seconds of inner stages, for each open stage."""
        if not is_main:
            return
        (run_dir / "trace").mkdir(parents=True, exist_ok=True)
        # Rich believes FORCE_COLOR, which notebooks set: they show cursor movements as text.
        if self._console.file.isatty() and "console" in loggers and verbosity != "quiet":
            self._progress = Progress(
                TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._steps_task = self._progress.add_task("step", total=steps)
            self._stage_task = self._progress.add_task("", total=None)
            self._progress.start()

    def begin(self, step: int = 0) -> None:
        """Start the trackers, and show `step` as the last finished one.

        Call this once the run's files hold the resumed state and nothing of later steps.
        """
        if not self._main:
            return
        self._has_begun = True
        self._write_status()
        self.warnings.resume(self._run_dir / "metrics.jsonl")
        if self._progress is not None:
            self._progress.update(self._steps_task, completed=step)
        if self._tracker_names:
            self._trackers = Trackers(self._run_dir, self._tracker_names, self._tracker_seconds, self.log)

    def _write_status(self) -> None:
        """Write status.json, which `watch` and `report` read."""
        write_whole(self._run_dir / "status.json", json.dumps({"state": self._state, "steps": self._steps}) + "\n")

    def log(self, text: str, level: Literal["quiet", "normal", "debug"] = "quiet") -> None:
        """Print a line for the user, unless `trainer.verbosity` is below its level."""
        if LEVELS.index(level) <= LEVELS.index(self._verbosity):
            self._console.print(plain(text), markup=False, soft_wrap=True)
        if self._log_file is not None:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with writing(self._log_file), self._log_file.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain(text)}\n")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; repeated stages of a step add up, and an inner stage's time is not part of the outer one's.

        Only the stage `step` includes its inner stages.
        """
        if self._progress is not None:
            self._progress.update(self._stage_task, description=name, total=None, completed=0)
        begin = time.perf_counter()
        self._inner.append(0.0)
        try:
            with self._stages.within(name):
                yield
                self._settle()
        finally:
            seconds = time.perf_counter() - begin
            inner = self._inner.pop()
            if self._inner:
                self._inner[-1] += seconds
            net = seconds if name == "step" else seconds - inner
            self._times[name] = self._times.get(name, 0.0) + net
            start_up.mark(name)
            self._spans.append({"name": name, "start": time.time() - self._start - seconds, "seconds": seconds})
            if self._main and (self._verbosity == "debug" or self._log_file is not None):
                used = psutil.Process().memory_info().rss / 1e9
                self.log(f"stage {name}: {net:.3f} s, {used:.2f} GB of host memory in use", "debug")

    def note_response(self) -> None:
        """Record what the start of the run took, once: the first response has arrived."""
        parts = start_up.end("first_response")
        if parts and self._main:
            seconds = sum(parts.values())
            rounded = {name: round(spent, 3) for name, spent in parts.items()}
            write_whole(
                self._run_dir / "trace" / "start.json", json.dumps({"seconds": round(seconds, 3), "parts": rounded}) + "\n"
            )
            shown = ", ".join(f"{name} {spent:.1f}" for name, spent in parts.items() if spent >= _SHOWN_PART)
            self.log(f"start    {seconds:.1f} s from the command to the first response: {shown}", "normal")

    @property
    def times(self) -> dict[str, float]:
        """Return the seconds of each stage of the step in progress."""
        return self._times

    def advance(self, done: int, total: int) -> None:
        """Show the progress of the current stage."""
        if self._progress is not None:
            self._progress.update(self._stage_task, completed=done, total=total)

    def curve(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        """Add (time by time.time, number) points to the timeline of this step."""
        self._curves.setdefault(name, []).extend((moment - self._start, number) for moment, number in points)

    def record(self, metrics: dict[str, float]) -> None:
        """Add metrics to the step in progress."""
        self._metrics.update(metrics)

    @property
    def pending(self) -> dict[str, float]:
        """Return the metrics of the step in progress so far.

        Stages with nothing to do are left out, for example without a critic, or if the engine already has the weights.
        """
        return self._metrics | {f"time/{name}": seconds for name, seconds in self._times.items() if seconds > _SHORTEST}

    def end_step(self, step: int) -> None:
        """Write the step's metrics and show its line; `step` counts from 1."""
        metrics = {"step": float(step), **self.pending}
        spans, self._spans, self._times, self._metrics = self._spans, [], {}, {}
        curves, self._curves = {name: points for name, points in self._curves.items() if points}, {}
        if self._main:
            append_json(self._run_dir / "metrics.jsonl", {**metrics, "step": step, "wall": time.time()})
            append_json(self._run_dir / "trace" / "stages.jsonl", {"step": step, "spans": spans, "curves": curves})
            shown = [f"{label} {metrics[name]:.4g}" for name, label in LINE.items() if name in metrics]
            shown += [
                f"{name} {metrics[name]:.3g}"
                for name in sorted(metrics)
                if name == "val/loss" or (name.startswith("val/") and "accuracy" in name)
            ]
            self.log(" | ".join([f"step {step}", *shown, *_seconds(step, metrics, spans)]), "normal")
            rows, sentences = self.warnings.of(step, metrics)
            for row in rows:
                append_json(self._run_dir / WARNINGS, row)
            for sentence in sentences:
                self.log(f"warning  {sentence}")
            if self._progress is not None:
                self._progress.update(self._steps_task, completed=step)

    def discard(self) -> None:
        """Discard everything recorded since the last step's metrics were written."""
        self._spans, self._times, self._metrics, self._curves = [], {}, {}, {}

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to samples.jsonl, and the trajectories among them to transcripts.jsonl."""
        if self._main:
            for row in rows:
                written = row.pop("transcript", None)
                append_json(self._run_dir / "samples.jsonl", row)
                if written is not None:
                    head = {name: row[name] for name in ("step", "kind", "group", "source", "prompt_id", "wall")}
                    append_json(self._run_dir / "transcripts.jsonl", head | written)

    def end(self, state: Literal["finished", "ended"], steps: int) -> None:
        """Record how the run ended, and after how many steps."""
        self._state, self._steps = state, steps

    def close(self) -> None:
        """Close displays and trackers; a run for which `end` was not called has failed."""
        if self._progress is not None:
            self._progress.stop()
        if self._has_begun:
            self._state = "failed" if self._state == "running" else self._state
            # A full disk may be why the run ends; that error is already reported.
            with suppress(OSError):
                self._write_status()
        if self._trackers is not None:
            self._trackers.close(is_finished=self._state == "finished")


def _seconds(step: int, metrics: dict[str, float], spans: list[dict[str, Any]]) -> list[str]:
    """Return the seconds of a step and of its evaluation, scoring included, as the console line shows them."""
    evaluation = [span["seconds"] for span in spans if span["name"] == "eval"]
    shown = [f"{metrics.get('time/step', 0):.1f} s"] if step else []
    return [*shown, *([f"evaluation {sum(evaluation):.1f} s"] if evaluation else [])]


def append_json(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON object as a line; numbers that JSON does not have (NaN, infinity) become null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False)
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def _finite(value: Any) -> Any:
    """Return the value with null in place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
