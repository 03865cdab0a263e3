"""What a tracker is: the surface of a library, as narrow as a run needs it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run before its first step."""

    run_dir: Path
    id: str
    """The same when the run is resumed. 16 digits and letters, chosen here; MLflow chooses its own."""
    is_resumed: bool
    first_step: int
    """Of what follows."""
    project: str
    name: str
    group: str | None
    tags: list[str]
    offline: bool
    config: dict[str, Any]
    """Sections of run.yaml."""


class Tracker(Protocol):
    """One tracked run; every call may raise or never return, which the run outlives."""

    settles: float
    """Seconds after which what was logged is safe where this process is killed; infinity: when it has finished."""

    def start(self, run: TrackedRun) -> tuple[str, str | None]:
        """Begin the tracked run, or continue it; its id, and where it can be seen."""
        ...

    def log(self, step: int, wall: float, metrics: dict[str, float]) -> None:
        """Metrics of a step, at a time.time()."""
        ...

    def samples(self, step: int, wall: float, columns: list[str], rows: list[list[Any]]) -> None:
        """A few samples of a step as a table."""
        ...

    def finish(self, is_good: bool) -> None:
        """Send what is left; not `is_good`: the run failed or was ended."""
        ...


def make_tracker(name: str) -> Tracker:
    """The tracker of a name in `trainer.loggers`; its library is imported here and nowhere else."""
    made: Tracker = import_module(f"fivefold.observability.trackers.{name}").make()
    return made


def flat(config: dict[str, Any], start: str = "") -> dict[str, Any]:
    """A nested configuration by full keys, for libraries that have no nesting."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{start}.{name}" if start else str(name)
        found |= flat(value, key) if isinstance(value, dict) and value else {key: value}
    return found
