"""Sandbox on the side of the reward process: programs and inputs in, outputs out. What a test expects stays here."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from fivefold.errors import RunError
from fivefold.reward.code import confine
from fivefold.reward.code.assertions import Assertions
from fivefold.reward.code.server import NOT_BEGUN, STOP

_LARGEST_OUTPUT_MB = 16
_START_SECONDS = 60.0
_SLACK_SECONDS = 30.0


@dataclass(frozen=True)
class Ran:
    """Result of a program."""

    status: str
    """`ended`, or the reason why the program was stopped or failed."""
    output: str
    """Text that the program wrote, or a function's result as JSON."""


class Sandbox:
    """Runs programs one after another; its server starts with the first one."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self.layers: dict[str, Any] = {}
        """Optional protections that are active: the version of Landlock, and whether the network is isolated."""

    def start(self) -> None:
        """Start the server; raise RuntimeError if programs cannot be confined here."""
        if (reason := confine.missing()) is not None:
            raise RunError(f"the reward `code` runs no program here: {reason}")
        self.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "fivefold.reward.code.server", str(theirs.fileno()), str(self._memory_mb),
                 str(_LARGEST_OUTPUT_MB)],
                env={name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
                | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # The server ends after this process and cleans up first; a signal to this process's group must not end it.
                start_new_session=True,
            )  # fmt: skip
        self.layers = self._receive(_START_SECONDS)
        tried = self.run("print(1)", "", None, _START_SECONDS, _START_SECONDS)
        if tried != Ran("ended", "1\n"):
            raise RunError(f"the simplest program does not run here: {tried}")

    def run(self, program: str, input_text: str, function: str | None, seconds: float, clock: float) -> Ran:
        """Run a program on one test, for at most so many seconds of CPU time and of wall-clock time.

        Raises RuntimeError without a sandbox.
        """
        with contextlib.ExitStack() as opened:
            files = [_file(text, opened) for text in (program, input_text, "", "")]
            self._begin({"seconds": seconds, "clock": clock, "function": function}, files)
            status = self._end(clock)
            wanted = files[2 if function is None else 3]
            size = os.fstat(wanted).st_size
            if size >= _LARGEST_OUTPUT_MB << 20:
                return Ran("output", "")
            return Ran(status, os.pread(wanted, size, 0).decode(errors="replace"))

    def check(self, programs: Sandbox, program: str, tests: Assertions, seconds: float, clock: float) -> str:
        """Run tests here that call a program in another sandbox, and return their status: `ended` if all of them hold."""
        limits = {"seconds": seconds, "clock": clock}
        with contextlib.ExitStack() as opened:
            files = [_file(text, opened) for text in (program, "", tests.text, "")]
            with contextlib.ExitStack() as lines:
                calls, calling, answers, answering = *os.pipe(), *os.pipe()
                for end in (calls, calling, answers, answering):
                    lines.callback(os.close, end)
                programs._begin({**limits, "serves": True}, [files[0], calls, files[1], answering])
                try:
                    self._begin({**limits, "names": tests.names}, [files[2], answers, files[3], calling])
                except RuntimeError:
                    programs.close()
                    raise
            try:
                return self._end(clock)
            finally:
                programs._stop(clock)

    def _begin(self, request: dict[str, Any], files: list[int]) -> None:
        if self._requests is None:
            self.start()
        assert self._requests is not None
        try:
            socket.send_fds(self._requests, [json.dumps(request).encode()], files)
        except OSError as error:
            self.close()
            raise RunError(f"the sandbox is gone: {error}") from error

    def _end(self, clock: float) -> str:
        """Wait for the request in progress and return its status."""
        try:
            status = str(self._receive(clock + _SLACK_SECONDS)["status"])
        except OSError as error:
            self.close()
            raise RunError(f"the sandbox is gone: {error}") from error
        if status == NOT_BEGUN:
            raise RunError("a program could not be locked up, or too little time or memory was left to do so")
        return status

    def _stop(self, clock: float) -> None:
        """Stop the request in progress."""
        if self._requests is not None:
            with contextlib.suppress(OSError):
                self._requests.send(STOP)
            self._end(clock)

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._requests is not None
        self._requests.settimeout(seconds)
        message = self._requests.recv(1 << 16)
        if not message:
            self.close()
            raise RunError("the sandbox ended by itself")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def close(self) -> None:
        """End the server, which ends its running program and removes its directory."""
        if self._requests is not None:
            self._requests.close()
        if self._server is not None:
            self._server.wait()
        self._requests = self._server = None


def _file(text: str, opened: contextlib.ExitStack) -> int:
    """Return a file in memory that is freed with its last descriptor."""
    file = os.memfd_create("test")
    opened.callback(os.close, file)
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file
