"""Samples -> rewards, in worker processes with a time limit a sample."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from fivefold.config.schema import RewardConfig
from fivefold.reward.choose import ChosenRewards, choose_rewards

if TYPE_CHECKING:
    from fivefold.types import Prompt, Sample


_START_SECONDS = 60.0


class RewardPool:
    """Scores samples; a function that hangs, raises or dies costs its sample the reward and leaves its error behind."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._chosen: dict[str, ChosenRewards] = {}
        self._workers = [_Worker(config.memory_mb, config.timeout_seconds) for _ in range(config.workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []
        self.first_error: str | None = None
        """The first sample's that failed since the last `wait`: a traceback where the function raised."""

    def weights(self, source: str) -> dict[str, float]:
        """Reward name -> weight for rows of this data_source; raises ValueError when none is known."""
        return self._rewards(source).weights

    def _rewards(self, source: str) -> ChosenRewards:
        if source not in self._chosen:
            self._chosen[source] = choose_rewards(self._config, source)
        return self._chosen[source]

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Set reward, reward_parts, correct and reward_failed of a sample, in the time until `wait` returns."""
        if self._threads is None:
            self._threads, self.first_error = ThreadPoolExecutor(len(self._workers)), None
        self._running.append(self._threads.submit(self._with_a_worker, prompt, sample))

    def wait(self) -> None:
        """Until every sample that was submitted is scored; an error of the pool itself is raised."""
        if self._threads is None:
            self.first_error = None
            return
        running, self._running = self._running, []
        self._threads.shutdown()
        self._threads = None
        for done in running:
            # An exception in a thread would otherwise leave its sample unscored and nobody the wiser.
            done.result()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _with_a_worker(self, prompt: Prompt, sample: Sample) -> None:
        worker = self._idle.get()
        try:
            self._score_one(worker, prompt, sample)
        finally:
            self._idle.put(worker)

    def _score_one(self, worker: _Worker, prompt: Prompt, sample: Sample) -> None:
        chosen = self._rewards(prompt.source)
        weights = chosen.weights
        sample.reward, sample.reward_parts, sample.correct, sample.reward_failed = 0.0, {}, False, False
        if chosen.accuracy is None:
            return
        offered = {
            "response": sample.text,
            "solution_str": sample.text,
            "ground_truth": prompt.ground_truth,
            "prompt": prompt.text,
            "data_source": prompt.source,
            "extra_info": prompt.extra,
        }
        answer = worker.ask({"rewards": list(weights), "sample": offered})
        error = answer.get("error")
        if error is None:
            sample.reward_parts = answer["values"]
            sample.reward = sum(weights[name] * value for name, value in sample.reward_parts.items())
            if not math.isfinite(sample.reward):
                error = f"a reward must be finite: got {sample.reward_parts}"
        sample.reward_failed = error is not None
        if error is not None:
            self.first_error = self.first_error or error
            sample.reward_parts = dict.fromkeys(weights, 0.0)
            sample.reward = 0.0
        sample.correct = sample.reward_parts[chosen.accuracy] >= 1


class _Worker:
    """One reward process, started when first asked and again after it was killed."""

    def __init__(self, memory_mb: int, timeout_seconds: float) -> None:
        self._memory_mb, self._timeout = memory_mb, timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer, or {"error": ...} when it gave none in time."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
                # Starting is not the sample's time.
                self._read(_START_SECONDS)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._process.stdin.flush()
            return self._read(self._timeout)
        except (TimeoutError, BrokenPipeError) as error:
            self.kill()
            return {"error": str(error) or "the reward process died"}

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next line of the worker; TimeoutError or BrokenPipeError when there is none."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no reward within {seconds} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise BrokenPipeError("the reward process died")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "fivefold.reward.process", str(self._memory_mb), str(self._timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
