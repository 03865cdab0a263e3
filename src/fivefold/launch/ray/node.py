"""The actor on each node of a Ray cluster: it starts the ranks of its node and reports their state."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import ray

from fivefold import __version__
from fivefold.config.schema import LaunchConfig
from fivefold.distributed.ports import free_port
from fivefold.distributed.pulse import Silence
from fivefold.errors import UserError
from fivefold.files import use_umask
from fivefold.launch.lock import locked
from fivefold.launch.processes import RankProcesses, clear
from fivefold.launch.watch import Cause

OUTPUT, ERRORS = 1, 2
_AT_ONCE = 1 << 16
_SLACK = 5.0
"""Extra seconds for the driver to end the run itself, if another node does not answer it."""
_LAST_WORKER_PORT = 19999
"""Default last worker port of `ray start`."""


@dataclass(frozen=True)
class Report:
    """State of a node before anything starts on it."""

    version: str
    """Version of this package on the node."""
    node_id: str
    address: str
    """Address at which ranks of other nodes reach it."""
    port: int
    """A free port."""
    gpus: list[str]
    """GPUs that Ray assigned to the ranks here, as CUDA_VISIBLE_DEVICES names them."""
    missing: list[str]
    """Paths that do not exist, or have other content than on the driver's machine."""


@dataclass(frozen=True)
class News:
    """What happened since the previous poll."""

    codes: list[int | None]
    output: list[tuple[int, bytes]]
    """Pieces of rank 0's output, each with its stream: OUTPUT or ERRORS."""
    is_speaking: bool
    """True if more output may come."""
    silent: list[Cause]
    """Causes for ranks that run and have given no sign of life for too long."""


class NodeRanks:
    """The actor of a node. Its ranks end with it, in whatever way it ends."""

    def __init__(self, ranks: range, directory: str, log_dir: str) -> None:
        """`directory`: the driver's working directory, which the ranks use too."""
        self._ranks, self._directory, self._log_dir = ranks, directory, Path(directory) / log_dir
        self._processes: RankProcesses | None = None
        self._terminal: _Terminal | None = None
        self._held = contextlib.ExitStack()
        self._polls = 0
        self._lock: tuple[int, ...] = ()
        self._gpus: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])

    def look(self, paths: Sequence[str], mark: tuple[str, str]) -> Report:
        """Returns the state of this node. `mark`: a file, and what the driver wrote into it."""
        missing = [path for path in [self._directory, *paths] if not (Path(self._directory) / path).exists()]
        marked = Path(self._directory) / mark[0]
        if not marked.is_file() or marked.read_text() != mark[1]:
            missing.append(str(marked.parent))
        node = ray.get_runtime_context().get_node_id()
        return Report(__version__, node, ray.util.get_node_ip_address(), _port(), self._gpus, missing)

    def hold(self, run_dir: str, umask: str) -> str:
        """Lock the run's directory for its ranks, and clear what ranks of an earlier run left.

        Returns why the directory cannot be locked, or an empty string.
        """
        use_umask(umask)
        try:
            self._lock = self._held.enter_context(locked(Path(self._directory) / run_dir))
        except UserError as error:
            return str(error)
        clear(self._log_dir)
        return ""

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], settings: LaunchConfig) -> None:
        """Start `python -m ARGUMENTS` once per rank. `variables`: the driver's additions to this node's environment."""
        os.chdir(self._directory)
        environment = {
            **os.environ,
            **variables,
            "OMP_NUM_THREADS": str(settings.threads or max(1, (os.cpu_count() or 1) // len(self._ranks))),
        }
        if self._gpus:
            # Ray does not set it if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)
        paths = [variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        if any(paths):
            environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(":".join(filter(None, paths)).split(":")))
        self._processes = RankProcesses(self._ranks, self._log_dir, settings.silent_seconds)
        threading.Thread(target=self._end_unheard, args=(settings.silent_seconds,), daemon=True).start()
        # Ray blocks Ctrl-C for its workers, and their children inherit that.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            if 0 in self._ranks:
                self._terminal = _Terminal()
                self._processes.start(arguments, environment, self._lock, self._terminal.files)
                self._terminal.listen()
            else:
                self._processes.start(arguments, environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> News:
        self._polls += 1
        output, is_speaking = ([], False) if self._terminal is None else self._terminal.take()
        return News(self._running.codes(), output, is_speaking, self._running.silent())

    def _end_unheard(self, limit: float) -> None:
        """End this process, and with it the ranks, if the driver has not polled for `limit` seconds: the network may be
        cut."""
        silence = Silence()
        while silence.look(self._polls, time.monotonic()) < limit + _SLACK:
            time.sleep(1.0)
        os._exit(1)

    def send(self, number: int) -> None:
        self._running.send(number)

    def causes(self) -> list[Cause]:
        return self._running.causes()

    def losses(self) -> list[Cause]:
        return self._running.losses()

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        self._held.close()

    @property
    def _running(self) -> RankProcesses:
        assert self._processes is not None
        return self._processes


def _port() -> int:
    """Returns a free port that Ray's workers will not take before the ranks do."""
    return next(port for port in iter(free_port, None) if port > _LAST_WORKER_PORT)


class _Terminal:
    """Keeps the output of rank 0 until it is taken."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        files: list[IO[bytes]] = []
        for stream in (OUTPUT, ERRORS):
            end, file = os.pipe()
            self._selector.register(end, selectors.EVENT_READ, stream)
            files.append(os.fdopen(file, "wb"))
        self.files = (files[0], files[1])
        self._output: list[tuple[int, bytes]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def listen(self) -> None:
        """Start to read, once rank 0 has its ends of the pipes."""
        for file in self.files:
            file.close()
        self._thread.start()

    def _read(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if piece := os.read(key.fd, _AT_ONCE):
                    self._output.append((key.data, piece))
                else:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)

    def take(self) -> tuple[list[tuple[int, bytes]], bool]:
        """Returns the output since the previous call, and whether more may come."""
        is_speaking = self._thread.is_alive()
        count = len(self._output)
        output, self._output[:count] = self._output[:count], []
        return output, is_speaking
