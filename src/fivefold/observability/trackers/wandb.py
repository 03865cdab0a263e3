"""Weights & Biases. A step that a resumed run repeats is appended: charts use `step` as axis and show both values."""

from __future__ import annotations

import math
from typing import Any

import wandb

from fivefold.observability.trackers.tracker import TrackedRun


class WandbTracker:
    settles = 30.0

    def start(self, run: TrackedRun) -> tuple[str, str | None]:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            group=run.group,
            tags=run.tags,
            config=run.config,
            dir=run.run_dir,
            mode="offline" if run.offline else None,
            # No user can answer questions here, and the output of this process is not the run's.
            settings=wandb.Settings(console="off", silent=True),
        )
        if self._run.settings.mode == "offline":
            # wandb writes its file when the run is closed.
            self.settles = math.inf
        self._run.define_metric("*", step_metric="step")
        return run.id, self._run.url

    def log(self, step: int, wall: float, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, wall: float, columns: list[str], rows: list[list[Any]]) -> None:
        self._run.log({"step": step, "samples": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})

    def finish(self, is_good: bool) -> None:
        self._run.finish(exit_code=0 if is_good else 1)


def make() -> WandbTracker:
    return WandbTracker()
