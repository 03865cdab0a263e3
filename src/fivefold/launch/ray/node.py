"""What runs on each node of a Ray cluster: an actor that starts this node's ranks and says what becomes of them."""

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
from fivefold.files import use_umask
from fivefold.launch.lock import locked
from fivefold.launch.processes import RankProcesses, clear
from fivefold.launch.watch import Cause

OUTPUT, ERRORS = 1, 2
_AT_ONCE = 1 << 16
_SLACK = 5.0
"""Seconds that the driver has to end the run itself, where another node does not answer it."""
_LAST_WORKER_PORT = 19999
"""As `ray start` has it when nobody says otherwise."""


@dataclass(frozen=True)
class Report:
    """What a node is before anything starts on it."""

    version: str
    """Of this package."""
    node_id: str
    address: str
    """Where ranks of other nodes reach it."""
    port: int
    """One that is free."""
    gpus: list[str]
    """That Ray gave to the ranks here, as CUDA_VISIBLE_DEVICES names them."""
    missing: list[str]
    """Paths that are not there, or hold something else."""


@dataclass(frozen=True)
class News:
    """What happened since the last time."""

    codes: list[int | None]
    said: list[tuple[int, bytes]]
    """Pieces of what rank 0 wrote, and whether to OUTPUT or to ERRORS."""
    is_speaking: bool
    """More may come."""
    silent: list[Cause]
    """Ranks that run and have given no sign of life for too long."""


class NodeRanks:
    """The actor. Its ranks end with it, in whatever way."""

    def __init__(self, ranks: range, directory: str, log_dir: str) -> None:
        """`directory`: the driver's working directory, which the ranks get too."""
        self._ranks, self._directory, self._log_dir = ranks, directory, Path(directory) / log_dir
        self._processes: RankProcesses | None = None
        self._terminal: _Terminal | None = None
        self._held = contextlib.ExitStack()
        self._polls = 0
        self._lock: tuple[int, ...] = ()
        self._gpus: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])

    def look(self, paths: Sequence[str], mark: tuple[str, str]) -> Report:
        """`mark`: a file, and what the driver wrote into it."""
        missing = [path for path in [self._directory, *paths] if not (Path(self._directory) / path).exists()]
        marked = Path(self._directory) / mark[0]
        if not marked.is_file() or marked.read_text() != mark[1]:
            missing.append(str(marked.parent))
        node = ray.get_runtime_context().get_node_id()
        return Report(__version__, node, ray.util.get_node_ip_address(), _port(), self._gpus, missing)

    def hold(self, run_dir: str | None, umask: str) -> str:
        """Take the run's directory for its ranks, if there is one to take, and clear what ranks of a run before left; why it
        cannot be had, or nothing."""
        use_umask(umask)
        try:
            if run_dir is not None:
                self._lock = self._held.enter_context(locked(Path(self._directory) / run_dir))
        except ValueError as error:
            return str(error)
        clear(self._log_dir)
        return ""

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], settings: LaunchConfig) -> None:
        """Start `python -m ARGUMENTS` once a rank. `variables`: what the driver adds to this node's environment."""
        os.chdir(self._directory)
        environment = {
            **os.environ,
            **variables,
            "OMP_NUM_THREADS": str(settings.threads or max(1, (os.cpu_count() or 1) // len(self._ranks))),
        }
        if self._gpus:
            # Ray leaves it as it is where RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)
        paths = [variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        if any(paths):
            environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(":".join(filter(None, paths)).split(":")))
        self._processes = RankProcesses(self._ranks, self._log_dir, settings.silent_seconds)
        threading.Thread(target=self._end_unheard, args=(settings.silent_seconds,), daemon=True).start()
        # Ray blocks Ctrl-C for its workers, and who is started inherits that.
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
        said, is_speaking = ([], False) if self._terminal is None else self._terminal.take()
        return News(self._running.codes(), said, is_speaking, self._running.silent())

    def _end_unheard(self, limit: float) -> None:
        """End this process, and with it the ranks, once the driver has not asked for so long: the network may be cut."""
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
    """A free one that Ray's workers will not take before the ranks do."""
    return next(port for port in iter(free_port, None) if port > _LAST_WORKER_PORT)


class _Terminal:
    """What rank 0 writes, kept until it is taken."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        files: list[IO[bytes]] = []
        for stream in (OUTPUT, ERRORS):
            end, file = os.pipe()
            self._selector.register(end, selectors.EVENT_READ, stream)
            files.append(os.fdopen(file, "wb"))
        self.files = (files[0], files[1])
        self._said: list[tuple[int, bytes]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def listen(self) -> None:
        """Once rank 0 has its ends of the pipes."""
        for file in self.files:
            file.close()
        self._thread.start()

    def _read(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if piece := os.read(key.fd, _AT_ONCE):
                    self._said.append((key.data, piece))
                else:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)

    def take(self) -> tuple[list[tuple[int, bytes]], bool]:
        """What it said since the last time, and whether it may say more."""
        is_speaking = self._thread.is_alive()
        count = len(self._said)
        said, self._said[:count] = self._said[:count], []
        return said, is_speaking
