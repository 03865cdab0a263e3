"""Stages, metrics and samples of a run -> console, metrics.jsonl, samples.jsonl, trace, trackers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fivefold.files import write_whole
from fivefold.observability.trackers.trackers import Trackers

if TYPE_CHECKING:
    from fivefold.types import Group

LINE = {
    "reward/mean": "reward",
    "policy/loss": "loss",
    "policy/grad_norm": "grad norm",
    "policy/entropy": "entropy",
    "policy/kl_reference": "kl",
    "critic/explained_variance": "explained variance",
    "prm/accuracy": "prm accuracy",
    "response/length_mean": "length",
    "rollout/logprob_diff_mean": "engine diff",
}
"""Metrics of the one line a step, and what they are called there."""


_SHORTEST = 2e-4
"""Seconds below which a stage is left out of the metrics."""


class RunLogger:
    """Rank 0 writes and speaks; on the other ranks it only keeps time."""

    def __init__(
        self,
        run_dir: Path,
        loggers: list[str],
        is_main: bool,
        steps: int,
        settle: Callable[[], None] = lambda: None,
        tracker_seconds: float = 30.0,
    ) -> None:
        """`settle` waits until the device has done what it was given: no stage pays for another. The run's end waits for
        trackers no longer than `tracker_seconds`."""
        self._settle, self._main, self._run_dir = settle, is_main, run_dir
        self._times: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._console = Console(quiet=not (is_main and "console" in loggers), highlight=False)
        self._tracker_names = [name for name in loggers if name != "console"]
        self._trackers: Trackers | None = None
        self._tracker_seconds, self._has_begun = tracker_seconds, False
        self._steps, self._state = steps, "running"
        self._progress: Progress | None = None
        self._start = time.time()
        self._spans: list[dict[str, Any]] = []
        self._curves: dict[str, list[tuple[float, float]]] = {}
        self._inner: list[float] = []
        """Seconds of the stages within each open stage."""
        if not is_main:
            return
        (run_dir / "trace").mkdir(parents=True, exist_ok=True)
        if self._console.is_terminal and "console" in loggers:
            self._progress = Progress(
                TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._steps_task = self._progress.add_task("step", total=steps)
            self._stage_task = self._progress.add_task("", total=None)
            self._progress.start()

    def begin(self) -> None:
        """The files of the run hold what it goes on from, and nothing of later steps: from here on trackers follow it."""
        if not self._main:
            return
        self._has_begun = True
        self._write_status()
        if self._tracker_names:
            self._trackers = Trackers(self._run_dir, self._tracker_names, self._tracker_seconds, self.log)

    def _write_status(self) -> None:
        """For whoever watches the run."""
        write_whole(self._run_dir / "status.json", json.dumps({"state": self._state, "steps": self._steps}) + "\n")

    def log(self, text: str) -> None:
        """A line for the user."""
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; repeated stages of a step add up, and an inner stage's time is not the outer one's.

        Only `step` is the whole step, whatever happens in it.
        """
        if self._progress is not None:
            self._progress.update(self._stage_task, description=name, total=None, completed=0)
        begin = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
            self._settle()
        finally:
            seconds = time.perf_counter() - begin
            inner = self._inner.pop()
            if self._inner:
                self._inner[-1] += seconds
            own = seconds if name == "step" else seconds - inner
            self._times[name] = self._times.get(name, 0.0) + own
            self._spans.append({"name": name, "start": time.time() - self._start - seconds, "seconds": seconds})

    @property
    def times(self) -> dict[str, float]:
        """Seconds of each stage of the step in progress."""
        return self._times

    def advance(self, done: int, total: int) -> None:
        """How far the stage in progress is."""
        if self._progress is not None:
            self._progress.update(self._stage_task, completed=done, total=total)

    def curve(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        """Add (moment by time.time, number) to what the step's timeline shows."""
        self._curves.setdefault(name, []).extend((moment - self._start, number) for moment, number in points)

    def record(self, metrics: dict[str, float]) -> None:
        """Add metrics to the step in progress."""
        self._metrics.update(metrics)

    @property
    def pending(self) -> dict[str, float]:
        """Metrics of the step in progress, so far. Stages with nothing to do (no critic, weights that the engine has) are
        not worth a curve."""
        return self._metrics | {f"time/{name}": seconds for name, seconds in self._times.items() if seconds > _SHORTEST}

    def end_step(self, step: int) -> dict[str, float]:
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
            self.log(f"step {step} | {' | '.join(shown)} | {metrics.get('time/step', 0):.1f} s")
            if self._progress is not None:
                self._progress.update(self._steps_task, completed=step)
        return metrics

    def discard(self) -> None:
        """Leave out what was recorded since the last step's metrics were written."""
        self._spans, self._times, self._metrics, self._curves = [], {}, {}, {}

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Append to samples.jsonl."""
        if self._main:
            for row in rows:
                append_json(self._run_dir / "samples.jsonl", row)

    def end(self, state: Literal["finished", "ended"], steps: int) -> None:
        """How the run ended, and how many steps it had."""
        self._state, self._steps = state, steps

    def close(self) -> None:
        """End the displays and the trackers; a run that said nothing of its end has failed."""
        if self._progress is not None:
            self._progress.stop()
        if self._has_begun:
            self._state = "failed" if self._state == "running" else self._state
            # Why the run ends is said already, where it is that the disk is full.
            with suppress(OSError):
                self._write_status()
        if self._trackers is not None:
            self._trackers.close(is_finished=self._state == "finished")


def sample_rows(step: int, groups: list[Group], count: int, kind: str) -> list[dict[str, Any]]:
    """The first sample of each of the first `count` groups, as rows of samples.jsonl; a reward that failed is null."""
    return [
        {
            "step": step,
            "kind": kind,
            "source": group.prompt.source,
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "response": group.samples[0].text,
            "ground_truth": group.prompt.ground_truth,
            "reward": group.samples[0].reward,
            "reward_parts": group.samples[0].reward_parts,
            "response_tokens": len(group.samples[0].token_ids),
            "finished": group.samples[0].finished,
            "wall": time.time(),
        }
        for group in [group for group in groups if group.samples][:count]
    ]


def append_json(path: Path, row: dict[str, Any]) -> None:
    """One JSON object a line; numbers that JSON does not have (NaN, infinity) become null."""
    clean = {key: None if isinstance(value, float) and value - value != 0 else value for key, value in row.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(clean, ensure_ascii=False) + "\n")
