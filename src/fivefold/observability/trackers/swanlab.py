"""SwanLab. A step that a resumed run repeats is sent again."""

from __future__ import annotations

import math
from typing import Any

import swanlab

from fivefold.observability.trackers.tracker import TrackedRun


class SwanlabTracker:
    settles = 30.0

    def start(self, run: TrackedRun) -> tuple[str, str | None]:
        directory = run.run_dir / "swanlab"
        directory.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            group=run.group,
            tags=run.tags,
            id=run.id,
            resume="allow",
            config=run.config,
            log_dir=str(directory),
            mode="offline" if run.offline else None,
            # This applies to a second start after a failure.
            reinit=True,
        )
        if self._run.mode == "online":
            return run.id, self._run.url
        # SwanLab writes its file when the run is closed.
        self.settles = math.inf
        return run.id, None

    def log(self, step: int, wall: float, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, wall: float, columns: list[str], rows: list[list[Any]]) -> None:
        table = swanlab.echarts.Table()
        table.add(columns, [["" if cell is None else cell for cell in row] for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self, is_good: bool) -> None:
        self._run.finish(state="success" if is_good else "crashed")


def make() -> SwanlabTracker:
    return SwanlabTracker()
