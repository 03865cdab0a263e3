"""A process next to a run that reads what it writes and hands it to one tracker.

Its words: RUN NAME LAST SECONDS, as `Follower` and `main` take them.

Its input is a pipe from rank 0. A line says how the run ended; the end of the pipe without one says that it was killed. The
run's files are the queue, so nothing is lost while a tracker is away, and the run waits for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from fivefold.distributed.processes import descendants, kill
from fivefold.distributed.scratch import scratch_directory
from fivefold.errors import first_line
from fivefold.observability.growing import GrowingRows
from fivefold.observability.trackers.state import State, without_secrets
from fivefold.observability.trackers.tracker import TrackedRun, Tracker, make_tracker

_LOOK = 0.3
"""Seconds between two looks at the files."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two attempts with a tracker that fails."""
_TRIES = 3
"""For a table: its texts may be what a tracker cannot take."""
_COLUMNS = ("kind", "source", "prompt", "response", "ground_truth", "reward", "response_tokens", "finished")


class Follower:
    """Reads the rows of a run and gives them to a tracker in their order."""

    def __init__(self, run_dir: Path, name: str, last: int) -> None:
        """`last`: the last step whose metrics stood in the file when the run was resumed; what a tracker has of later ones
        is of steps that are done anew. -1: it is another run than the one before, if there was one."""
        config = yaml.safe_load((run_dir / "run.yaml").read_text(encoding="utf-8"))
        self._settings = config["tracking"]
        self._run_dir, self._name, self._config = run_dir, name, config
        self._metrics, self._samples = GrowingRows(run_dir / "metrics.jsonl"), GrowingRows(run_dir / "samples.jsonl")
        self._rows: deque[dict[str, Any]] = deque()
        self._tables: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._tries = 0
        self._given: deque[tuple[float, int]] = deque()
        """(moment, step) of what was given and is not safe yet."""
        self._tracker: Tracker | None = None
        self.state = State.read(run_dir, name) if last >= 0 else State()
        self._read()
        self.state.sent = self.state.given = min(self.state.sent, last)
        self.state.has_finished, self.state.error, self.state.lost_tables = False, None, 0
        while self._rows and self._rows[0]["step"] <= self.state.sent:
            self._tables.pop(self._rows.popleft()["step"], None)

    def follow(self, ended: threading.Event, tell: Callable[[str], None]) -> None:
        """Give everything to the tracker until the run has ended and nothing is left. Whoever calls bounds the time."""
        pause = _LOOK
        while True:
            was_last = ended.is_set()
            try:
                if self._tracker is None:
                    self._start(tell)
                self._read()
                self._give()
                if self.state.error is not None:
                    tell("takes metrics again")
                self.state.error, pause = None, _LOOK
                self._write()
                if was_last:
                    return
            except Exception as error:
                said = without_secrets(f"{type(error).__name__}: {first_line(error)}")
                if said != self.state.error:
                    self._keep(without_secrets(traceback.format_exc()))
                if self.state.error is None:
                    tell(f"{said}; the run goes on, and it is tried again")
                self.state.error = said
                self._write()
                pause = _SHORTEST_PAUSE if was_last else min(max(_SHORTEST_PAUSE, 2 * pause), _LONGEST_PAUSE)
            ended.wait(pause)
            if self.state.error is not None and was_last:
                time.sleep(pause)

    def _keep(self, text: str) -> None:
        with contextlib.suppress(OSError), (self._run_dir / f"trackers/{self._name}.log").open("a", encoding="utf-8") as log:
            log.write(text)

    def finish(self, is_good: bool) -> None:
        """Close the tracked run."""
        assert self._tracker is not None
        self._tracker.finish(is_good)
        self.state.sent, self.state.has_finished = self.state.given, True
        self._write()

    def _start(self, tell: Callable[[str], None]) -> None:
        settings, state = self._settings, self.state
        run = TrackedRun(
            run_dir=self._run_dir,
            id=state.id or uuid.uuid4().hex[:16],
            is_resumed=bool(state.id),
            first_step=state.sent + 1,
            project=settings["project"],
            name=settings["name"] or self._run_dir.resolve().name,
            group=settings["group"],
            tags=list(settings["tags"]),
            offline=settings["offline"],
            config=self._config,
        )
        tracker = make_tracker(self._name)
        state.id, url = tracker.start(run)
        state.url = None if url is None else without_secrets(url)
        self._tracker = tracker
        self._write()
        if state.url:
            tell(state.url)

    def _read(self) -> None:
        # In this order: samples of a step are written before its metrics.
        rows, _ = self._metrics.new()
        samples, _ = self._samples.new()
        every = self._settings["samples_every"]
        for row in samples:
            if every and (row.get("kind") == "val" or row["step"] % every == 0):
                self._tables[row["step"]].append(row)
        self._rows.extend(rows)

    def _give(self) -> None:
        assert self._tracker is not None
        while self._rows:
            row = self._rows[0]
            step, wall = row["step"], float(row.get("wall") or time.time())
            metrics = {
                name: float(value)
                for name, value in row.items()
                if name not in ("step", "wall") and isinstance(value, int | float)
            }
            if self.state.given < step:
                self._tracker.log(step, wall, metrics)
                self.state.given = step
                self._given.append((time.monotonic(), step))
            self._give_samples(step, wall)
            self._rows.popleft()
            self._settle()

    def _give_samples(self, step: int, wall: float) -> None:
        assert self._tracker is not None
        if step not in self._tables:
            return
        columns = list(_COLUMNS)
        rows = [[row.get(name) for name in columns] for row in self._tables[step]]
        try:
            self._tracker.samples(step, wall, columns, rows)
        except Exception:
            self._tries += 1
            if self._tries < _TRIES:
                raise
            self.state.lost_tables += 1
        self._tries = 0
        del self._tables[step]

    def _settle(self) -> None:
        assert self._tracker is not None
        while self._given and time.monotonic() >= self._given[0][0] + self._tracker.settles:
            self.state.sent = self._given.popleft()[1]

    def _write(self) -> None:
        if self._tracker is not None:
            self._settle()
        with contextlib.suppress(OSError):
            self.state.write(self._run_dir, self._name)


def main() -> None:
    """Follow a run as its own process; see the module."""
    run_dir, name, last, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    if os.fork():
        # What the run's ranks start is killed with them; this has to outlive them by a moment, to send what is left.
        os._exit(0)
    os.setsid()
    says = os.fdopen(os.dup(1), "w", buffering=1)
    pipe = os.fdopen(os.dup(0), "r")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        # Libraries ask nobody and print nothing here.
        os.dup2(nothing, number)

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):
            says.write(f"{text}\n")

    says.write(f"{os.getpid()}\n")
    ended, words = threading.Event(), []

    def wait() -> None:
        words.append(pipe.read())
        ended.set()
        time.sleep(seconds)
        _end(scratch)

    # What a library leaves there goes with this process; it is imported below.
    scratch = scratch_directory()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    (run_dir / "trackers").mkdir(exist_ok=True)
    threading.Thread(target=wait, daemon=True).start()
    with (run_dir / "trackers" / f".{name}.lock").open("w") as lock:
        # The follower of a run that was killed may still be at it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        follower = Follower(run_dir, name, last)
        follower.follow(ended, tell)
        try:
            follower.finish(words[0].strip() == "finished")
        except Exception as error:
            tell(f"did not finish: {without_secrets(first_line(error))}")
    _end(scratch)


def _end(scratch: Path) -> None:
    """End this process and what a library has started, whatever they are doing, and remove its temporary files."""
    kill(descendants(psutil.Process()))
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
