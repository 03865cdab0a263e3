"""Samples -> rewards, in worker processes with a time limit per sample."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fivefold.config.scoring import RewardConfig
from fivefold.reward.choose import ChosenRewards, choose_rewards
from fivefold.reward.judge import JUDGE, Judge, JudgeError
from fivefold.reward.messages import Messages

if TYPE_CHECKING:
    from fivefold.types import Prompt, Sample


_START_SECONDS = 300.0
"""Until a process has imported what its functions import: minutes where a cluster's file system is cold."""
_END_SECONDS = 5.0
"""Until a process that has closed its files is gone."""
_PATIENCE = 0.1
"""Seconds that a sample waits for a process that is busy, before another one is started."""
_KILLED = "ended by SIGKILL"
_MOST_WORKERS = 32
Scoring = Future[str | None]
"""Of a sample: why it failed, once that is known."""
KEPT_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip
"""What reward processes have of the trainer's environment, besides `reward.environment`: nothing that could be a secret."""


def cores_of_rank() -> int:
    """The cores that this process may use, shared with the other ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def clean_environment(passed: Iterable[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a reward process: `passed` are the names that it may have besides the usual ones."""
    return {name: environment[name] for name in (*KEPT_VARIABLES, *passed) if name in environment}


class RewardPool:
    """Scores samples; a function that hangs, raises or dies costs its sample the reward and leaves its error behind.

    A sample whose scoring is done has a finite reward, or has failed: there is nothing in between.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._chosen: dict[str, ChosenRewards] = {}
        self._names: set[str] = set()
        """Functions that every process loads before it is asked."""
        count = config.workers or min(max(2, cores_of_rank()), _MOST_WORKERS)
        self._workers = [_Worker(config) for _ in range(count)]
        # The last one used comes first: the others are started only where they are needed.
        *others, first = self._workers
        self._idle: LifoQueue[_Worker] = LifoQueue()
        self._idle.put(first)
        self._asleep = deque(others)
        """Those that were not started yet."""
        self._threads, self._starting = ThreadPoolExecutor(count), ThreadPoolExecutor(count)
        self._judge: Judge | None = None
        self._tokenizer, self._turns = str(config.judge.model), itertools.count()
        self._is_closed = False

    def ask_judges_at(self, urls: Sequence[str], directory: Path) -> None:
        """Before the first sample: where the judge's servers are, and its files."""
        self._config = replace(self._config, judge=replace(self._config.judge, url=list(urls)))
        self._tokenizer = str(directory)

    def weights(self, source: str) -> dict[str, float]:
        """Reward name -> weight for rows of this data_source; raises ValueError when none is known."""
        return self._rewards(source).weights

    def _rewards(self, source: str) -> ChosenRewards:
        if source not in self._chosen:
            self._chosen[source] = choose_rewards(self._config, source)
            self._names |= set(_functions(self._chosen[source]))
        return self._chosen[source]

    def start(self, trials: Sequence[tuple[Prompt, Sample]]) -> str | None:
        """Load the functions of all sources named so far and call each once, on these samples, in every process that starts.

        What a function imports and prepares is then not on a sample's time. Gives the first error of a call; raises
        ValueError where a function cannot be loaded or does not answer.
        """
        requests = [self._request(*trial) for trial in trials if _functions(self._rewards(trial[0].source))]
        for worker in self._workers:
            worker.names, worker.trials = sorted(self._names), requests
        judged = [trial for trial in trials if JUDGE in self.weights(trial[0].source)]
        if judged and (error := self.submit(*judged[0]).result()) is not None:
            # Nothing that is wrong here is the response's: it is the ground truth.
            raise ValueError(f"reward.judge: {error}")
        if not requests:
            return None
        # The others are started where they are needed, and do the same before their first sample.
        first = self._workers[-1]
        try:
            first.start()
        except _NoAnswerError as error:
            raise ValueError(f"the reward functions {', '.join(first.names)} do not start:\n{error}") from error
        return first.trial_error

    def submit(self, prompt: Prompt, sample: Sample) -> Scoring:
        """Set reward, reward_parts, correct and reward_failed of a sample, in the time until that is done."""
        # It has failed until it is scored.
        _fail(sample)
        if JUDGE not in self._rewards(prompt.source).weights:
            return self._threads.submit(self._score, prompt, sample)
        if self._judge is None:
            self._judge = Judge(self._config.judge)
        return self._judge.submit(self._score_with(self._judge, prompt, sample))

    def wait(self, scoring: Sequence[Scoring]) -> str | None:
        """Until all of these are done, or those that were not begun within `reward.wait_seconds` have failed; the first of
        their errors."""
        late = wait(scoring, self._config.wait_seconds).not_done
        given_up = {each for each in late if each.cancel()}
        if given_up and self._judge is not None:
            self._judge.settle()
        # What has begun ends within its own time.
        wait(late - given_up)
        waited = f"no reward within {self._config.wait_seconds:g} s after the last response (reward.wait_seconds)"
        errors = (waited if each.cancelled() else each.result() for each in scoring)
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        """End the processes, and what is still being scored with them."""
        self._is_closed = True
        if self._judge is not None:
            self._judge.close()
            self._judge = None
        for worker in self._workers:
            worker.end()
        self._starting.shutdown(cancel_futures=True)
        self._threads.shutdown(cancel_futures=True)

    def _score(self, prompt: Prompt, sample: Sample) -> str | None:
        """Why it failed: a traceback where the function raised."""
        try:
            error = self._score_now(prompt, sample)
        except Exception:
            # Whatever goes wrong here (no files or memory for a process) is this sample's failure, and counted as such.
            error = traceback.format_exc()
        if error is not None:
            _fail(sample)
        return error

    def _score_now(self, prompt: Prompt, sample: Sample) -> str | None:
        chosen = self._rewards(prompt.source)
        if chosen.accuracy is None:
            sample.reward, sample.reward_failed = 0.0, False
            return None
        found = self._values(prompt, sample)
        return found if isinstance(found, str) else _finish(sample, chosen, found)

    async def _score_with(self, judge: Judge, prompt: Prompt, sample: Sample) -> str | None:
        """As `_score`, with a judge's verdict; in the judge's thread."""
        chosen = self._rewards(prompt.source)
        try:
            parts: dict[str, float] = {JUDGE: await judge.value(prompt, sample.text)}
            if _functions(chosen):
                found = await asyncio.wrap_future(self._threads.submit(self._values, prompt, sample))
                if isinstance(found, str):
                    return found
                parts |= found
            error = _finish(sample, chosen, parts)
        except JudgeError as failed:
            return str(failed)
        except Exception:
            error = traceback.format_exc()
        if error is not None:
            _fail(sample)
        return error

    def _values(self, prompt: Prompt, sample: Sample) -> dict[str, float] | str:
        """What the functions of a sample's rewards give, or why one does not."""
        if self._is_closed:
            return "the run has ended"
        worker = self._free()
        try:
            answer = worker.ask(self._request(prompt, sample), self._config.timeout_seconds)
        finally:
            self._idle.put(worker)
        error = _error_of(answer)
        if error is not None:
            return error
        return {name: float(answer["values"][name]) for name in _functions(self._rewards(prompt.source))}

    def _free(self) -> _Worker:
        """The process that is free first. Where none is for a while another one is started, which nobody waits for: that
        takes longer than most rewards."""
        with contextlib.suppress(Empty):
            return self._idle.get(timeout=_PATIENCE)
        with contextlib.suppress(IndexError, RuntimeError):
            # None is left to be started, or the run has ended.
            self._starting.submit(self._wake, self._asleep.pop())
        return self._idle.get()

    def _wake(self, worker: _Worker) -> None:
        # Whoever asks it next is told what is wrong.
        with contextlib.suppress(Exception):
            worker.start()
        self._idle.put(worker)

    def _request(self, prompt: Prompt, sample: Sample) -> dict[str, Any]:
        offered = {
            "response": sample.text,
            "solution_str": sample.text,
            "ground_truth": prompt.ground_truth,
            "prompt": prompt.text,
            "data_source": prompt.source,
            "extra_info": prompt.extra,
        }
        if (judge := self._config.judge).functions_ask:
            address = urlsplit(judge.url[next(self._turns) % len(judge.url)]).netloc
            offered |= {"reward_router_address": address, "reward_model_tokenizer": self._tokenizer}
        return {"rewards": _functions(self._rewards(prompt.source)), "sample": offered}


def _functions(chosen: ChosenRewards) -> list[str]:
    """Those of the rewards that are functions."""
    return [name for name in chosen.weights if name != JUDGE]


def _finish(sample: Sample, chosen: ChosenRewards, parts: dict[str, float]) -> str | None:
    """Set the reward of a sample from its parts; why there is none."""
    reward = sum(weight * parts[name] for name, weight in chosen.weights.items())
    if not all(map(math.isfinite, [reward, *parts.values()])):
        return f"a reward must be finite: got {parts}"
    sample.reward, sample.reward_parts, sample.reward_failed = reward, parts, False
    sample.correct = parts[str(chosen.accuracy)] >= 1
    return None


def _fail(sample: Sample) -> None:
    sample.reward, sample.reward_parts, sample.correct, sample.reward_failed = math.nan, {}, False, True


def _error_of(answer: dict[str, Any]) -> str | None:
    """Why an answer has no values."""
    if isinstance(answer.get("values"), dict):
        return None
    return str(answer.get("error") or f"the reward process gave no values: {answer}")


class _NoAnswerError(Exception):
    """Why a reward process gave none."""

    def __init__(self, reason: str, was_killed: bool = False) -> None:
        super().__init__(reason)
        self.was_killed = was_killed
        """From outside: by the kernel for lack of memory, or by somebody."""


class _Worker:
    """One reward process, started when first asked and again after it was killed."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.names: list[str] = []
        """Functions that it loads when it starts."""
        self.trials: list[dict[str, Any]] = []
        """Requests that it answers when it starts, so that nothing is imported on a sample's time."""
        self.trial_error: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: Messages | None = None
        self._numbers = itertools.count(1)
        self._starts, self._is_over = threading.Lock(), False

    def end(self) -> None:
        """Kill the process for good: whoever was about to start it is told that the run has ended."""
        with self._starts:
            self._is_over = True
        self.kill()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The worker's answer, or {"error": ...} when it gave none in time; a process that was killed is asked once more."""
        try:
            return self._ask(request, seconds)
        except _NoAnswerError as error:
            if not error.was_killed:
                return {"error": str(error)}
        try:
            return self._ask(request, seconds)
        except _NoAnswerError as error:
            return {"error": str(error)}

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.start()
        return self._exchange({**request, "id": next(self._numbers)}, seconds, "no reward")

    def start(self) -> None:
        """Start the process unless it is there; raises _NoAnswerError where a function cannot be loaded."""
        if self._process is not None and not _has_ended(self._process):
            return
        self.kill()
        own, theirs = socket.socketpair()
        with theirs, self._starts:
            if self._is_over:
                own.close()
                raise _NoAnswerError("the run has ended")
            self._messages = Messages(own)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fivefold.reward.process", str(theirs.fileno())],
                env=clean_environment(self._config.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # What a function starts is in its group, and is ended with it.
                start_new_session=True,
            )
        settings = {"id": 0, "rewards": self.names, "memory_mb": self._config.memory_mb}
        settings["code"] = {**asdict(self._config.code), "sample_seconds": self._config.timeout_seconds}
        if error := _error_of(self._exchange(settings, _START_SECONDS, "its functions were not loaded")):
            self.kill()
            raise _NoAnswerError(error)
        found = [self._exchange({**trial, "id": 0}, _START_SECONDS, "no reward") for trial in self.trials]
        self.trial_error = next((error for answer in found if (error := _error_of(answer)) is not None), None)

    def _exchange(self, request: dict[str, Any], seconds: float, missing: str) -> dict[str, Any]:
        """Any trouble ends the process: what it says later would be taken for the answer to another request."""
        assert self._messages is not None
        is_gone = False
        try:
            self._messages.send(request, seconds)
            answer = self._messages.receive(seconds)
            if answer is not None and answer.get("id") == request["id"]:
                return answer
            reason, is_gone = f"not the answer to this sample: {answer}", answer is None
        except TimeoutError:
            reason = f"{missing} within {seconds:g} s"
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason, is_gone = f"no exchange with the reward process: {error}", isinstance(error, ConnectionError)
        ended = self.kill(_END_SECONDS if is_gone else 0.0)
        raise _NoAnswerError(f"the reward process {ended}" if is_gone else reason, ended == _KILLED)

    def kill(self, patience: float = 0.0) -> str:
        """End the process with what it started, and say how it ended; it has so many seconds to end by itself."""
        process, messages = self._process, self._messages
        self._process = self._messages = None
        if messages is not None:
            messages.close()
        if process is None:
            return "was not there"
        ended = _has_ended(process, patience)
        # Its group lives on in what it started, also where it has ended itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if not ended:
            return "was ended"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _has_ended(process: subprocess.Popen[bytes], patience: float = 0.0) -> bool:
    """Whether it has ended, or does so within some seconds; its number stays its own until it is waited for."""
    deadline = time.monotonic() + patience
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(1e-3)
    return True
