"""Trackio: a database of this machine, or the Space or server that its variables name. Repeated steps are appended."""

from __future__ import annotations

from typing import Any

import trackio

from fivefold.observability.trackers.tracker import TrackedRun


class TrackioTracker:
    settles = 10.0

    def start(self, run: TrackedRun) -> tuple[str, str | None]:
        # Trackio identifies runs by name, and another run may have the same name.
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:6]}",
            group=run.group,
            config=run.config | {"tags": run.tags},
            resume="allow",
            embed=False,
        )
        return run.id, None

    def log(self, step: int, wall: float, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, wall: float, columns: list[str], rows: list[list[Any]]) -> None:
        self._run.log({"samples": trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self, is_good: bool) -> None:
        self._run.finish()


def make() -> TrackioTracker:
    return TrackioTracker()
