"""Process next to a run that reads the run's files and passes their rows to one tracker.

Its arguments are RUN NAME LAST SECONDS, as `Follower` and `main` take them.

Its input is a pipe from rank 0. A line reports how the run ended; if the pipe closes without a line, the run was killed. The
run's files are the queue, so nothing is lost while a tracker is not reachable, and the run never waits.
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
"""Seconds between two reads of the files."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Shortest and longest seconds between two attempts, while a tracker fails."""
_TRIES = 3
"""Attempts for a table, because the tracker may refuse its texts."""
_COLUMNS = ("kind", "source", "prompt", "response", "ground_truth", "reward", "response_tokens", "finished")


class Follower:
    """Reads the rows of a run and passes them to a tracker in their order."""

    def __init__(self, run_dir: Path, name: str, last: int) -> None:
        """Create the follower of one tracker.

        `last` is the last step in the metrics file when the run was resumed; the tracker's later steps will be repeated.
        With -1, this is a different run from the one before, if there was one.
        """
        config = yaml.safe_load((run_dir / "run.yaml").read_text(encoding="utf-8"))
        self._settings = config["tracking"]
        self._run_dir, self._name, self._config = run_dir, name, config
        self._metrics, self._samples = GrowingRows(run_dir / "metrics.jsonl"), GrowingRows(run_dir / "samples.jsonl")
        self._rows: deque[dict[str, Any]] = deque()
        self._tables: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._tries = 0
        self._given: deque[tuple[float, int]] = deque()
        """(time, step) pairs that were passed to the tracker and are not safely stored yet."""
        self._tracker: Tracker | None = None
        self.state = State.read(run_dir, name) if last >= 0 else State()
        self._read()
        self.state.sent = self.state.given = min(self.state.sent, last)
        self.state.has_finished, self.state.error, self.state.lost_tables = False, None, 0
        while self._rows and self._rows[0]["step"] <= self.state.sent:
            self._tables.pop(self._rows.popleft()["step"], None)

    def follow(self, ended: threading.Event, tell: Callable[[str], None]) -> None:
        """Pass everything to the tracker until the run has ended and no row is left; the caller limits the time."""
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
                message = without_secrets(f"{type(error).__name__}: {first_line(error)}")
                if message != self.state.error:
                    self._keep(without_secrets(traceback.format_exc()))
                if self.state.error is None:
                    tell(f"{message}; the run continues, and it is tried again")
                self.state.error = message
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
        # In this order, because samples of a step are written before its metrics.
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
    """Follow a run as a separate process; see the module."""
    run_dir, name, last, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    if os.fork():
        # Processes that the run's ranks start are killed with them. This one must outlive them to send what is left.
        os._exit(0)
    os.setsid()
    says = os.fdopen(os.dup(1), "w", buffering=1)
    pipe = os.fdopen(os.dup(0), "r")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        # Libraries cannot read input or print here.
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

    # Temporary files of a library are removed with this process; the library is imported below.
    scratch = scratch_directory()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    (run_dir / "trackers").mkdir(exist_ok=True)
    threading.Thread(target=wait, daemon=True).start()
    with (run_dir / "trackers" / f".{name}.lock").open("w") as lock:
        # The follower of a killed run may still hold the lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
        follower = Follower(run_dir, name, last)
        follower.follow(ended, tell)
        try:
            follower.finish(words[0].strip() == "finished")
        except Exception as error:
            tell(f"did not finish: {without_secrets(first_line(error))}")
    _end(scratch)


def _end(scratch: Path) -> None:
    """End this process and every process that a library has started, and remove its temporary files."""
    kill(descendants(psutil.Process()))
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
