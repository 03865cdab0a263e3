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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from fivefold.config.environment import REWARD
from fivefold.config.scoring import RewardConfig
from fivefold.errors import UserError
from fivefold.keys.ranges import FLOATS
from fivefold.reward.choose import ChosenRewards, choose_rewards, default_accuracy, reads_tokens
from fivefold.reward.forms import TOKENS
from fivefold.reward.judge import JUDGE, Judge, JudgeError
from fivefold.reward.messages import Messages
from fivefold.reward.rules import BUILT_IN, runs_programs

if TYPE_CHECKING:
    from fivefold.types import Prompt, Sample

T = TypeVar("T")


_START_SECONDS = 300.0
"""Seconds for a process to import what its functions need: minutes if a cluster's file system is cold."""
_END_SECONDS = 5.0
"""Seconds for a process to exit after it has closed its files."""
_PATIENCE = 0.1
"""Seconds that a sample waits for a busy process before another process is started."""
_KILLED = "ended by SIGKILL"
_MOST_WORKERS = 32
_QUICK_SECONDS, _LONG_SECONDS = 0.1, 1.0
"""CPU seconds of a built-in function per response: at first, and once no other sample waits."""
_SLOW_SHARE = 0.1
"""Share of `reward.wait_seconds` that each process may spend per step on responses that took too long at first."""
_Values = dict[str, float | None] | str
"""Function -> its value, None where it does not apply to the response; or the reason why one has no value."""
Scoring = Future[str | None]
"""Future of a sample's error: None if it was scored."""
_ALONE = "a reward that compares responses with each other is not supported"
KEPT_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip
"""Variables of the trainer's environment that reward processes get besides `reward.environment`: none could be a secret."""


def cores_of_rank() -> int:
    """Return the number of cores for this process, shared with the machine's other ranks."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def clean_environment(passed: Iterable[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a reward process; `passed` are the variables that it gets besides the usual ones."""
    return {name: environment[name] for name in (*KEPT_VARIABLES, *passed) if name in environment}


class RewardPool:
    """Scores samples; a function that hangs, raises or dies costs its sample the reward and leaves an error message.

    A scored sample has a finite reward or has failed. A response that takes a built-in function too long gets 0 from it
    (`reward_timed_out`). The function first gets a short time. It gets a longer one once no other sample waits, as long as
    the step's time for such responses lasts.
    """

    def __init__(self, config: RewardConfig, judge_files: Path | None = None) -> None:
        """`judge_files`: directory of the judge's files, if the run has started its servers."""
        self._config = config
        self._chosen: dict[str, ChosenRewards] = {}
        self._names: set[str] = set()
        """Names of functions that every process loads before its first request."""
        count = config.workers or min(max(2, cores_of_rank()), _MOST_WORKERS)
        self._workers = [_Worker(config) for _ in range(count)]
        # The process used last is taken first; the others are started only when needed.
        *others, first = self._workers
        self._idle: LifoQueue[_Worker] = LifoQueue()
        self._idle.put(first)
        self._asleep = deque(others)
        """Processes that were not started yet."""
        self._threads, self._starting = ThreadPoolExecutor(count), ThreadPoolExecutor(count)
        self._lock = threading.Lock()
        self._fresh, self._slow = deque[_Job](), deque[_Job]()
        """Samples that were not tried yet, and samples that took too long at first."""
        self._slow_budget = _SLOW_SHARE * config.wait_seconds * count
        self._slow_seconds = self._slow_budget
        """Seconds of process time that remain for slow samples in this step."""
        self._judge: Judge | None = None
        self.forms: list[str] = []
        """How each user function is called, one line each."""
        self._sends_tokens = reads_tokens(config)
        self._tokenizer, self._turns = str(judge_files or config.judge.model), itertools.count()
        self._is_closed = False

    def weights(self, source: str) -> dict[str, float]:
        """Return reward name -> weight for rows of this data_source; raise ValueError if none is known."""
        return self._rewards(source).weights

    def _rewards(self, source: str) -> ChosenRewards:
        if source not in self._chosen:
            self._chosen[source] = choose_rewards(self._config, source)
            self._names |= set(_functions(self._chosen[source]))
        return self._chosen[source]

    def start(self, trials: Sequence[tuple[Prompt, Sample]]) -> str | None:
        """Load the functions of these samples' data_sources and call each once on its sample.

        Every process that starts does so. Imports and preparation then do not count toward a sample's time. Returns the
        first error of a call; raises ValueError if a function cannot be loaded or does not answer. Sets `forms`.
        """
        requests = [
            _request(name, self._offered(*trial), _LONG_SECONDS, is_trial=True)
            for trial in trials
            for name in _functions(self._rewards(trial[0].source))
        ]
        for worker in self._workers:
            worker.names, worker.trials = sorted(self._names), requests
        judged = [trial for trial in trials if JUDGE in self.weights(trial[0].source)]
        if judged and (error := self.submit(*judged[0]).result()) is not None:
            # An error here is not the response's fault: the trial response is the ground truth.
            raise UserError(f"reward.judge: {error}")
        if not requests:
            return None
        # Other processes start when needed, and do the same before their first sample.
        first = self._workers[-1]
        try:
            _again_after_kill(first.start)
        except _NoAnswerError as error:
            raise UserError(f"the reward functions {', '.join(first.names)} do not start:\n{error}") from error
        self.forms = first.forms
        return first.trial_error

    def submit(self, prompt: Prompt, *sequences: Sample) -> Scoring:
        """Begin to set reward, reward_parts, correct and reward_failed of the sequences of a trajectory, which is scored
        once; until then it counts as failed."""
        _fail(sequences)
        chosen = self._rewards(prompt.source)
        if JUDGE not in chosen.weights:
            return self._begin(prompt, sequences, lambda values: _finish(sequences, chosen, values))
        if self._judge is None:
            self._judge = Judge(self._config.judge)
        return self._judge.submit(self._score_with(self._judge, prompt, sequences))

    def wait(self, scoring: Sequence[Scoring]) -> str | None:
        """Wait until all of these are done, or until those not begun within `reward.wait_seconds` have failed.

        Returns the first error among them.
        """
        late = wait(scoring, self._config.wait_seconds).not_done
        given_up = {future for future in late if future.cancel()}
        if given_up and self._judge is not None:
            self._judge.settle()
        if late:
            self._slow_seconds = 0.0
        # Calls that have begun end within their own time limit.
        wait(late - given_up)
        self._slow_seconds = self._slow_budget
        waited = f"no reward within {self._config.wait_seconds:g} s after the last response (reward.wait_seconds)"
        errors = (waited if future.cancelled() else future.result() for future in scoring)
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        """End the processes, and fail the samples that are still being scored."""
        self._is_closed = True
        if self._judge is not None:
            self._judge.close()
            self._judge = None
        for worker in self._workers:
            worker.end()
        self._starting.shutdown(cancel_futures=True)
        self._threads.shutdown(cancel_futures=True)
        for job in self._fresh:
            job.future.cancel()
        for job in self._slow:
            job.end("the run has ended")

    async def _score_with(self, judge: Judge, prompt: Prompt, sequences: Sequence[Sample]) -> str | None:
        """Score a trajectory with a judge's verdict, in the judge's thread; return its error."""
        chosen = self._rewards(prompt.source)
        try:
            parts: dict[str, float | None] = {JUDGE: await judge.value(prompt, _text(sequences))}
            if _functions(chosen):
                values: _Values = await asyncio.wrap_future(self._begin(prompt, sequences, lambda values: values))
                if isinstance(values, str):
                    return values
                parts |= values
            error = _finish(sequences, chosen, parts)
        except JudgeError as failed:
            return str(failed)
        except Exception:
            error = traceback.format_exc()
        if error is not None:
            _fail(sequences)
        return error

    def _begin(self, prompt: Prompt, sequences: Sequence[Sample], finish: Callable[[_Values], Any]) -> Future[Any]:
        """Queue the functions of a trajectory's rewards; the future holds the result of `finish` for their values."""
        # Built-in functions first, those that run programs last: a user's function does not use up their time.
        names = _functions(self._rewards(prompt.source))
        names.sort(key=lambda name: (name not in BUILT_IN, runs_programs(name)))
        job = _Job(sequences, self._offered(prompt, *sequences), names, finish)
        with self._lock:
            self._fresh.append(job)
        self._threads.submit(self._work)
        return job.future

    def _work(self) -> None:
        """Process one job; jobs that took too long at first come only if there is no other."""
        with self._lock:
            job = self._fresh.popleft() if self._fresh else self._slow.popleft() if self._slow else None
        if job is None or not (job.is_slow or job.future.set_running_or_notify_cancel()):
            return
        try:
            outcome = self._values(job)
        except Exception:
            # Any error here (no files or memory for a process) is this sample's failure, and counted as such.
            outcome = traceback.format_exc()
        if outcome is not None:
            job.end(outcome)
            return
        with self._lock:
            job.is_slow = True
            self._slow.append(job)
        with contextlib.suppress(RuntimeError):
            # If the run has ended, `close` settles the job.
            self._threads.submit(self._work)

    def _values(self, job: _Job) -> _Values | None:
        """Return the values of a job's functions, or an error; None if the job is to be tried again after the others."""
        if self._is_closed:
            return "the run has ended"
        if not job.names:
            return job.values
        if job.is_slow and self._slow_seconds <= 0:
            job.count_as_late(*(name for name in job.names if name in BUILT_IN))
        limit = min(_LONG_SECONDS if job.is_slow else _QUICK_SECONDS, self._config.timeout_seconds)
        worker, begin = self._free(), time.monotonic()
        end: float | None = None
        try:
            while job.names:
                name, seconds = job.names[0], self._config.timeout_seconds
                is_built_in = name in BUILT_IN
                if end is not None:
                    seconds = max(end - time.monotonic(), 1e-3)
                elif not is_built_in:
                    # A user's functions share the sample's time.
                    end = time.monotonic() + seconds
                answer = worker.ask(_request(name, job.offered, limit), seconds)
                is_late = is_built_in and _is_late(answer)
                if is_late and "error" not in answer and not job.is_slow:
                    return None
                if is_late:
                    job.count_as_late(name)
                elif (error := _error_of(answer)) is not None:
                    return error
                else:
                    job.values[name] = None if answer["value"] is None else float(answer["value"])
                    job.names.remove(name)
        finally:
            self._idle.put(worker)
            if job.is_slow:
                with self._lock:
                    self._slow_seconds -= time.monotonic() - begin
        return job.values

    def _free(self) -> _Worker:
        """Return the process that becomes free first.

        If none is free for a while, another one is started in the background; starting takes longer than most rewards.
        """
        with contextlib.suppress(Empty):
            return self._idle.get(timeout=_PATIENCE)
        with contextlib.suppress(IndexError, RuntimeError):
            # No process is left to start, or the run has ended.
            self._starting.submit(self._wake, self._asleep.pop())
        return self._idle.get()

    def _wake(self, worker: _Worker) -> None:
        # The next request to this process gets the error.
        with contextlib.suppress(Exception):
            worker.start()
        self._idle.put(worker)

    def _offered(self, prompt: Prompt, *sequences: Sample) -> dict[str, Any]:
        """Return what forms.py makes a function's arguments of."""
        offered = {
            "response": _text(sequences),
            "ground_truth": prompt.ground_truth,
            "prompt": prompt.text,
            "prompts": prompt.given,
            "data_source": prompt.source,
            "extra_info": prompt.extra,
            "columns": prompt.columns,
            **({TOKENS: _tokens(sequences)} if self._sends_tokens else {}),
        }
        if (judge := self._config.judge).functions_ask:
            address = urlsplit(judge.url[next(self._turns) % len(judge.url)]).netloc
            offered |= {"reward_router_address": address, "reward_model_tokenizer": self._tokenizer}
        return offered


@dataclass
class _Job:
    """A trajectory whose functions are being called."""

    sequences: Sequence[Sample]
    offered: dict[str, Any]
    names: list[str]
    """Names of functions that have no value yet, in their order."""
    finish: Callable[[_Values], Any]
    future: Future[Any] = field(default_factory=Future)
    values: dict[str, float | None] = field(default_factory=dict)
    is_slow: bool = False
    """True if a built-in function took too long at first."""

    def count_as_late(self, *names: str) -> None:
        """Give these functions the value 0, because the response took them too long."""
        self.values |= dict.fromkeys(names, 0.0)
        self.names = [name for name in self.names if name not in names]
        for sample in self.sequences:
            sample.reward_timed_out = sample.reward_timed_out or bool(names)

    def end(self, outcome: _Values) -> None:
        """Settle the future; a sample without values has failed."""
        try:
            error = self.finish(outcome)
        except Exception:
            error = traceback.format_exc()
        if isinstance(error, str):
            _fail(self.sequences)
        self.future.set_result(error)


def _request(name: str, offered: dict[str, Any], seconds: float, is_trial: bool = False) -> dict[str, Any]:
    """The request to a reward process; a built-in function that runs no programs has so many seconds of CPU time."""
    is_limited = name in BUILT_IN and not runs_programs(name)
    return {"reward": name, "sample": offered, "cpu_seconds": seconds if is_limited else None, "is_trial": is_trial}


def _functions(chosen: ChosenRewards) -> list[str]:
    """Return the rewards that are functions."""
    return [name for name in chosen.weights if name not in (JUDGE, REWARD)]


def _text(sequences: Sequence[Sample]) -> str:
    """Return what the model said in a trajectory, in the order of its turns, which its sequences may not have."""
    texts = {turn.number: turn.text for sample in sequences for turn in sample.turns}
    if len(sequences) == 1 or not texts or None in texts.values():
        return "\n".join(sample.text for sample in sequences)
    return "\n".join(str(texts[number]) for number in sorted(texts))


def _tokens(sequences: Sequence[Sample]) -> list[int]:
    """Return the tokens of what the model said in a trajectory, in the order of its turns, without observations."""
    turns = {turn.number: sample.token_ids[turn.begin : turn.end] for sample in sequences for turn in sample.turns}
    if not turns:
        return [token for sample in sequences for token in sample.token_ids]
    return [token for number in sorted(turns) for token in turns[number]]


def _finish(sequences: Sequence[Sample], chosen: ChosenRewards, parts: _Values) -> str | None:
    """Set the reward of a trajectory from its parts; return an error if there is none."""
    if isinstance(parts, str):
        return parts
    if chosen.accuracy is None:
        for sample in sequences:
            sample.reward, sample.reward_failed = 0.0, False
        return None
    values = {name: value for name, value in parts.items() if value is not None}
    weight = chosen.weights.get(REWARD, 0.0)
    # Sequences may have turns in common.
    given = {turn.number: turn.given for sample in sequences for turn in sample.turns}
    if REWARD in chosen.weights:
        values[REWARD] = sum(given.values())
    if not values:
        return f"each of the rewards {', '.join(parts)} is None, which says that it does not apply: one must be a number"
    reward = sum(weight * values[name] for name, weight in chosen.weights.items() if name in values)
    if not all(abs(number) <= FLOATS[1] for number in (reward, *values.values(), *given.values())):
        return f"a reward must be finite, and at most {FLOATS[1]:g} because training computes in float32: got {values}"
    accuracy = chosen.accuracy if chosen.accuracy in values else _accuracy(tuple(values))
    for sample in sequences:
        sample.turns = tuple(replace(turn, reward=weight * turn.given) for turn in sample.turns)
        environment_parts = {f"{REWARD}/{name}": value for name, value in sample.environment_rewards.items()}
        sample.reward, sample.reward_parts, sample.reward_failed = reward, values | environment_parts, False
        sample.correct = values[str(accuracy)] >= 1
    return None


_accuracy = cache(default_accuracy)


def _fail(sequences: Sequence[Sample]) -> None:
    for sample in sequences:
        sample.reward, sample.reward_parts, sample.correct, sample.reward_failed = math.nan, {}, False, True
        sample.reward_timed_out = False


def _is_late(answer: dict[str, Any]) -> bool:
    """Whether the function took too long, by its CPU time or by the clock."""
    return bool(answer.get("is_late"))


def _error_of(answer: dict[str, Any]) -> str | None:
    """Return why an answer has no value, or None."""
    if "value" in answer and isinstance(answer["value"], (int, float, type(None))):
        return None
    return str(answer.get("error") or f"the reward process gave no value: {answer}")


class _NoAnswerError(Exception):
    """Raised with the reason why a reward process gave no answer."""

    def __init__(self, reason: str, was_killed: bool = False, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late
        """True if the time limit was exceeded."""
        self.was_killed = was_killed
        """True if the process was killed from outside, for example by the kernel for lack of memory."""


def _again_after_kill(action: Callable[[], T]) -> T:
    """Return the result of `action`, which is called again if the process was killed from outside in the first call."""
    try:
        return action()
    except _NoAnswerError as error:
        if not error.was_killed:
            raise
    return action()


class _Worker:
    """One reward process, started at the first request and again after it was killed."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.names: list[str] = []
        """Names of the functions that it loads when it starts."""
        self.trials: list[dict[str, Any]] = []
        """Requests that it answers when it starts, so that no import counts toward a sample's time."""
        self.trial_error: str | None = None
        self.forms: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: Messages | None = None
        self._numbers = itertools.count(1)
        self._starts, self._is_over = threading.Lock(), False

    def end(self) -> None:
        """Kill the process permanently: a thread that is about to start it gets the error that the run has ended."""
        with self._starts:
            self._is_over = True
        self.kill()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the worker's answer, or {"error": ...} without one in time; after a kill the request is sent once more."""
        try:
            return _again_after_kill(lambda: self._ask(request, seconds))
        except _NoAnswerError as error:
            return {"error": str(error), "is_late": error.is_late}

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.start()
        return self._exchange({**request, "id": next(self._numbers)}, seconds, "no reward")

    def start(self) -> None:
        """Start the process unless it runs; raise _NoAnswerError if a function cannot be loaded."""
        if self._process is not None and not _has_ended(self._process):
            return
        self.kill()
        ours, theirs = socket.socketpair()
        with theirs, self._starts:
            if self._is_over:
                ours.close()
                raise _NoAnswerError("the run has ended")
            self._messages = Messages(ours)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fivefold.reward.process", str(theirs.fileno())],
                env=clean_environment(self._config.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Processes started by a function are in the same group, and are killed with it.
                start_new_session=True,
            )
        settings = {"id": 0, "rewards": self.names, "memory_mb": self._config.memory_mb}
        settings["code"] = {**asdict(self._config.code), "sample_seconds": self._config.timeout_seconds}
        confirmed = self._exchange(settings, _START_SECONDS, "its functions were not loaded")
        if error := _error_of(confirmed):
            self.kill()
            raise _NoAnswerError(error)
        self.forms = confirmed["forms"]
        answers = [self._exchange({**trial, "id": 0}, _START_SECONDS, "no reward") for trial in self.trials]
        errors = (_error_of(answer) for answer in answers if not _is_late(answer))
        self.trial_error = next((error for error in errors if error is not None), None)
        self.forms += [
            f"{trial['reward']} gives other rewards when its lists have two elements: {_ALONE}"
            for trial, answer in zip(self.trials, answers, strict=True)
            if answer.get("lists_matter")
        ]

    def _exchange(self, request: dict[str, Any], seconds: float, missing: str) -> dict[str, Any]:
        """Send a request and return its answer.

        Any error kills the process: a late answer would be taken for the answer to another request.
        """
        assert self._messages is not None
        is_gone = is_late = False
        try:
            self._messages.send(request, seconds)
            answer = self._messages.receive(seconds)
            if answer is not None and answer.get("id") == request["id"]:
                return answer
            reason, is_gone = f"not the answer to this sample: {answer}", answer is None
        except TimeoutError:
            reason, is_late = f"{missing} within {seconds:g} s", True
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason, is_gone = f"no exchange with the reward process: {error}", isinstance(error, ConnectionError)
        ended = self.kill(_END_SECONDS if is_gone else 0.0)
        raise _NoAnswerError(f"the reward process {ended}" if is_gone else reason, ended == _KILLED, is_late)

    def kill(self, patience: float = 0.0) -> str:
        """Kill the process and its children, and return how it ended; it has `patience` seconds to exit by itself."""
        process, messages = self._process, self._messages
        self._process = self._messages = None
        if messages is not None:
            messages.close()
        if process is None:
            return "was not there"
        ended = _has_ended(process, patience)
        # Its children keep its process group alive, even after it has exited.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if not ended:
            return "was ended"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _has_ended(process: subprocess.Popen[bytes], patience: float = 0.0) -> bool:
    """Return whether the process ends within `patience` seconds; its process id stays reserved until it is waited for."""
    deadline = time.monotonic() + patience
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(1e-3)
    return True
