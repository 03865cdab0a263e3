"""`fivefold` commands for tests: the real `main`, launcher and ranks, in processes that need not import anything."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

import psutil

from fivefold.launch.lock import locked
from tests.support.zygote import THREADS, close_all_but, fork, zygote

LONGEST = 1500.0
"""Seconds after which a command is taken to hang: many times what the longest one needs on a busy machine."""


class Rank:
    """A rank that was forked, as the launcher sees the processes that it starts."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes] | None,
        inherited: Sequence[int],
        errors: IO[bytes] | None = None,
    ) -> None:
        def body() -> None:
            stdin = os.open(os.devnull, os.O_RDONLY)
            os.dup2(stdin, 0)
            if log is not None:
                os.dup2(log.fileno(), 1)
                os.dup2((errors or log).fileno(), 2)
            close_all_but(inherited)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            _become(environment)
            sys.argv = list(arguments)
            importlib.import_module(arguments[0]).main()

        self.pid = fork(body, new_session=True)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            # The launcher's signal handler asks too, and may be told first.
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _become(environment: Mapping[str, str]) -> None:
    """Take over an environment, and what libraries read of it when they start."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", THREADS)))


def _command(
    arguments: list[str], environment: dict[str, str], directory: str, hook: Callable[[], None] | None, files: list[int]
) -> int:
    from fivefold import cli
    from fivefold.launch import processes

    stdin = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((stdin, *files)):
        os.dup2(file, number)
    close_all_but([])
    os.chdir(directory)
    _become(environment)
    sys.argv = ["fivefold", *arguments]
    processes.start_rank = Rank  # type: ignore[assignment]
    if hook is not None:
        hook()
    return cli.main()


class Command:
    """A command that runs in a session of its own, with what of subprocess.Popen the tests use."""

    def __init__(self, *arguments: object, hook: Callable[[], None] | None = None) -> None:
        """`hook` runs before `main`; what it changes is changed in the ranks too."""
        self.args = [str(argument) for argument in arguments]
        # Files and not pipes: no one needs to read while the command runs.
        self._output, self._error = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        job = (self.args, dict(os.environ), os.getcwd(), hook)
        self.pid = zygote.fork(_command, job, [self._output.fileno(), self._error.fileno()], new_session=True)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = zygote.reap(self.pid, 0)
        return self.returncode

    def wait(self, seconds: float = LONGEST) -> int:
        if self.returncode is None:
            self.returncode = zygote.reap(self.pid, seconds)
        if self.returncode is None:
            self.kill()
            zygote.reap(self.pid, seconds)
            raise subprocess.TimeoutExpired(self.args, seconds, *self.communicate())
        return self.returncode

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Its exit code and what it said, when it ended."""
        return subprocess.CompletedProcess(self.args, self.wait(), *self.communicate())

    def communicate(self) -> list[str]:
        """What it said so far."""
        texts = []
        for file in (self._output, self._error):
            file.seek(0)
            texts.append(file.read().decode())
        return texts

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fivefold(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command, done."""
    return Command(*arguments).finish()


def python(
    *arguments: object, env: Mapping[str, str] = MappingProxyType({}), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, done."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=LONGEST, env={**os.environ, **env}, stdin=subprocess.DEVNULL, cwd=cwd,
    )  # fmt: skip


def program(
    module: str, *arguments: object, env: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS`, done: what a user starts."""
    return python("-m", module, *arguments, env=env)


def wait_for(condition: Callable[[], bool], process: Command | subprocess.Popen[str] | None = None) -> None:
    """Return when `condition` holds; fail when it does not for very long, or the process that should bring it about ends."""
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert process is None or process.poll() is None, f"it ended with {process.returncode}: {process.communicate()}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def words_of(pid: int) -> list[str]:
    """The command of a process; empty if it has ended."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def gone(pids: list[int]) -> bool:
    """Whether these processes have ended; one may do so while it is looked at."""

    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(lives(pid) for pid in pids)


def is_free(run_dir: Path) -> bool:
    """No process holds the directory of a run that was killed: what a rank has forked to write, or Ray's worker, ends later."""
    try:
        with locked(run_dir):
            return True
    except ValueError:
        return False


def with_cpu_seconds(
    run: Callable[[], subprocess.CompletedProcess[str]],
) -> tuple[subprocess.CompletedProcess[str], float]:
    """A fresh interpreter's answer and what it cost, which a busy machine hardly changes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
