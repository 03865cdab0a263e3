"""An engine's server as a separate process: started, waited for, and ended with this one."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fivefold.distributed.compiler_caches import use_compiler_caches
from fivefold.distributed.ports import free_port
from fivefold.distributed.processes import descendants, kill, unname_shared_memory
from fivefold.distributed.scratch import name_shared_memory, scratch_directory, unlink_shared_memory
from fivefold.errors import RunError

if TYPE_CHECKING:
    import torch

_ERROR = re.compile(r"\b\w+(Error|Exception): ")
_MOST_ERRORS, _TAIL_LINES = 3, 20
_LONGEST_START = 1800.0
"""Most seconds until a server is ready: the first compilation of a large model takes minutes."""


class ServerProcess:
    """Runs `python -m MODULE ARGUMENTS`, which listens on a socket of this user alone, or on a port for other machines."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        is_ready: Callable[[str], bool],
        host: str | None = None,
    ) -> None:
        """The module takes the socket's path as `--uds`, or `--host` and `--port` if a `host` is given. `is_ready` returns
        whether the server answers at an address."""
        self._directory = scratch_directory()
        # Files that its processes leave in the temporary directory, mostly sockets, are removed with it.
        self._environment = {**environment, "TMPDIR": str(self._directory)}
        self._arguments, self.log = list(arguments), log
        self._is_ready, self._host, self._port = is_ready, host, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = self._log_begin = 0

    @property
    def address(self) -> str:
        """Address of the current process. It differs after a restart, so clients of the earlier process find no server
        there."""
        return f"http://{self._host}:{self._port}" if self._host else f"unix:{self._directory}/{self._starts}"

    def start(self) -> None:
        """Start the server from scratch; `wait` returns when it answers."""
        self.end()
        self._starts += 1
        self._port = free_port() if self._host else 0
        listens = (
            ["--host", self._host, "--port", str(self._port)] if self._host else ["--uds", self.address[len("unix:") :]]
        )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments, *listens],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Killing this rank's session must spare the tracker that removes what the server leaves.
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the server answers; raises RuntimeError with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + _LONGEST_START
        while not self._is_ready(self.address):
            if self.has_ended:
                raise RunError(f"the engine's server did not start\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise RunError(f"the engine's server does not answer after {_LONGEST_START:.0f} s\n{self.last_words()}")
            time.sleep(0.2)
        for process in self._family():
            unname_shared_memory(process.pid)
        # The maps of a process that has created a semaphore do not show its name.
        unlink_shared_memory(self._directory)

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def last_words(self) -> str:
        """Returns the first errors in its log since the last start, which caused the others, and the end of the log."""
        with self.log.open("rb") as log:
            log.seek(self._log_begin)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if _ERROR.search(line)][:_MOST_ERRORS]
        return "\n".join([*errors, f"the end of {self.log}:", *lines[-_TAIL_LINES:]])

    def end(self) -> None:
        """Kill the server and its children."""
        if self._process is None:
            return
        kill(self._family())
        with contextlib.suppress(ProcessLookupError):
            # Python's tracker of shared memory ends last, unless it is stopped.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        unlink_shared_memory(self._directory)
        for left in self._directory.glob("*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def close(self) -> None:
        self.end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *descendants(parent)]
        return []


def own_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without the variables of ranks, plus this process's id, so that the server ends
    with it."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
    # Outside a server's temporary files, so that the next server can use what was compiled.
    use_compiler_caches(variables)
    return {**variables, **changes, _PARENT: str(os.getpid())}


def devices_from(device: torch.device, devices: int) -> dict[str, str]:
    """Returns the environment variables of a server on this rank's GPU and the following ones, `devices` in all."""
    if device.type != "cuda":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(device.index + devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device.index : device.index + devices])}


def run_as_program(name: str, main: Callable[[list[str]], None], in_children: Callable[[], None] = lambda: None) -> None:
    """Run `main` if the module with this `__name__` is the program, and `in_children` in each process that its library
    spawns; let them all end with their parent, and their shared memory be removed with the server's scratch directory."""
    if name in ("__main__", "__mp_main__"):
        end_with_parent(is_first=name == "__main__")
        if _PARENT in os.environ:
            name_shared_memory(Path(tempfile.gettempdir()))
    if name == "__main__":
        main(sys.argv[1:])
    elif name == "__mp_main__":
        in_children()


def end_with_parent(is_first: bool) -> None:
    """Let the kernel end this process when its parent ends, in whatever way.

    `is_first`: the process was started by a `ServerProcess`, or by a user, whose shell may end before it.
    """
    starter = multiprocessing.parent_process()
    parent = int(os.environ.get(_PARENT, 0)) if is_first else starter.pid if starter else 0
    if is_first and not parent:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        # The parent ended before the call to the kernel.
        os._exit(1)


_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_PARENT = "FIVEFOLD_SERVER_PARENT"
_PR_SET_PDEATHSIG = 1
