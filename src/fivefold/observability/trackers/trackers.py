"""Trackers of a run on rank 0: starts them, prints their messages, and waits for them for a limited time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import yaml

from fivefold.config.packages import TRACKERS, missing_packages
from fivefold.distributed.processes import descendants, kill
from fivefold.distributed.scratch import remove_scratch
from fivefold.errors import UserError
from fivefold.files import read_json_object, read_text
from fivefold.keys.ranges import OneOf
from fivefold.observability.growing import GrowingRows
from fivefold.observability.trackers.state import State

_SPARE = 2.0
"""Seconds between the end that a follower sets for itself and the time at which it is killed."""


class Trackers:
    """One process for each tracker of a run; none of them can delay the run."""

    def __init__(self, run_dir: Path, names: Sequence[str], seconds: float, say: Callable[[str], None]) -> None:
        """Start the trackers; `seconds` limits how long the end of the run waits for all of them.

        A run without metrics gets new tracked runs; any other run continues its own.
        """
        self._run_dir, self._seconds, self._say = run_dir, seconds, say
        rows, _ = GrowingRows(run_dir / "metrics.jsonl").new()
        words = [str(rows[-1]["step"] if rows else -1), str(seconds)]
        self._followers: dict[str, _Follower] = {}
        for name in names:
            try:
                self._followers[name] = _Follower(name, run_dir, words, say)
            except OSError as error:
                say(f"{name}: cannot be started: {error}; `fivefold track {run_dir}` sends the run later")

    def close(self, is_finished: bool) -> None:
        """Report that the run has ended, wait, and print what was not sent."""
        for follower in self._followers.values():
            follower.end("finished" if is_finished else "failed")
        deadline = time.monotonic() + self._seconds + _SPARE
        rows, _ = GrowingRows(self._run_dir / "metrics.jsonl").new()
        for name, follower in self._followers.items():
            follower.join(max(0.0, deadline - time.monotonic()))
            state = State.read(self._run_dir, name)
            if lost := sum(row["step"] > state.given for row in rows):
                reason = state.error or f"it did not answer within {self._seconds:g} s"
                self._say(
                    f"{name}: {lost} of {len(rows)} steps were not sent: {reason}; "
                    f"they are in metrics.jsonl, and `fivefold track {self._run_dir}` sends them"
                )
            elif not state.has_finished:
                self._say(f"{name}: did not finish within {self._seconds:g} s; `fivefold track {self._run_dir}` tries again")
            if state.lost_tables:
                self._say(f"{name}: refused the samples of {state.lost_tables} steps; trackers/{name}.log has the reason")


class _Follower:
    """One follower process and its pipes."""

    def __init__(self, name: str, run_dir: Path, words: list[str], say: Callable[[str], None]) -> None:
        self._name, self._say, self._pid = name, say, 0
        module = "fivefold.observability.trackers.follower"
        # The process must not see the variables of torch's launchers: libraries would read them as their own.
        variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(run_dir), name, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True, env=variables,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Print what the process writes, until it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._pid:
                self._say(f"{self._name}: {line.rstrip()}")
            else:
                self._pid = int(line)
        self._process.wait()

    def end(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(word)
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def join(self, seconds: float) -> None:
        """Wait until the process has ended, and kill it if that takes too long."""
        self._listener.join(seconds)
        if self._listener.is_alive() and self._pid:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self._pid)
                kill([*descendants(process), process])
                remove_scratch(self._pid)


def send_again(run_dir: Path, names: Sequence[str] | None, seconds: float, say: Callable[[str], None]) -> None:
    """Send the steps of an ended run that its trackers have not received.

    `names` replaces the run's own trackers; raises ValueError if there are none.
    """
    if not (run_dir / "run.yaml").is_file():
        raise UserError(f"{run_dir} must be the directory of a run: it has no run.yaml")
    if names is None:
        loggers = yaml.safe_load(read_text(run_dir / "run.yaml"))["trainer"]["loggers"]
        names = [name for name in loggers if name in TRACKERS]
    if not names:
        raise UserError(f"{run_dir} names no tracker in trainer.loggers: name one with --to {' | '.join(TRACKERS)}")
    for name in names:
        if fault := OneOf(TRACKERS).fault(name):
            raise UserError(f"a tracker {fault}")
        if missing := missing_packages(TRACKERS[name]):
            raise UserError(f"{'; '.join(missing)}: pip install {name}")
    status = run_dir / "status.json"
    is_finished = status.is_file() and read_json_object(status).get("state") == "finished"
    Trackers(run_dir, names, seconds, say).close(is_finished)
    for name in names:
        state = State.read(run_dir, name)
        say(f"{name}: has steps up to {state.sent}" + (f", {state.url}" if state.url else ""))
