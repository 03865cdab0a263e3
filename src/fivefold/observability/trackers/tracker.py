"""Interface of a tracker: the few calls of a library that a run needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run that a tracker gets before the first step."""

    run_dir: Path
    id: str
    """Id of the tracked run, the same after a resume: 16 hexadecimal digits chosen here; MLflow chooses its own."""
    is_resumed: bool
    first_step: int
    """First step that will be logged."""
    project: str
    name: str
    group: str | None
    tags: list[str]
    offline: bool
    config: dict[str, Any]
    """Sections of run.yaml."""


class Tracker(Protocol):
    """One tracked run; any call may raise or never return without stopping the run."""

    settles: float
    """Seconds after which logged data is safe if this process is killed; infinity: only after `finish`."""

    def start(self, run: TrackedRun) -> tuple[str, str | None]:
        """Start the tracked run or continue it; return its id and its URL, if it has one."""
        ...

    def log(self, step: int, wall: float, metrics: dict[str, float]) -> None:
        """Log the metrics of a step; `wall` is a time by time.time()."""
        ...

    def samples(self, step: int, wall: float, columns: list[str], rows: list[list[Any]]) -> None:
        """Log some samples of a step as a table."""
        ...

    def finish(self, is_good: bool) -> None:
        """Send what is left; `is_good` is False if the run failed or was ended."""
        ...


def make_tracker(name: str) -> Tracker:
    """Return the tracker for a name in `trainer.loggers`; its library is imported only here."""
    tracker: Tracker = import_module(f"fivefold.observability.trackers.{name}").make()
    return tracker


def flat(config: dict[str, Any], start: str = "") -> dict[str, Any]:
    """Return a nested configuration by full keys, for libraries without nesting."""
    keys: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{start}.{name}" if start else str(name)
        keys |= flat(value, key) if isinstance(value, dict) and value else {key: value}
    return keys
