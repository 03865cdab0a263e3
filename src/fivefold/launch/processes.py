"""Starts, checks and ends the ranks of one machine as its processes. All our launchers use this on each node."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from fivefold.distributed.ports import on_one_machine
from fivefold.distributed.pulse import VARIABLE as PULSE
from fivefold.distributed.pulse import SignBoard, Silence
from fivefold.distributed.scratch import remove_scratch, scratch_directory
from fivefold.launch.deaths import MemoryWatch, describe
from fivefold.launch.last_words import VARIABLE, LastWords, Words
from fivefold.launch.watch import Cause, Kind

_LAST_LINES = 20
_LOOK_SECONDS = 1.0
"""Seconds between two checks for signs of life."""
MOST_FILES = 65536
"""Open files of a rank, if the machine allows so many. Shells start with 1,024, and a request to a server takes one."""
_LONGEST_END = 30.0
"""Most seconds to wait for a killed process to end."""
_PIPE, _LAUNCHER = "FIVEFOLD_LAUNCHER_PIPE", "FIVEFOLD_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_STATES = {
    "T": "it is stopped by a signal", "D": "it waits in the kernel for a disk, a network file system or a device",
}  # fmt: skip


def allow_open_files() -> int:
    """Let this process and those that it starts open up to `MOST_FILES` files; returns how many they may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):
        return soft
    return most


def start_rank(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes] | None,
    inherited: Sequence[int],
    errors: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m ARGUMENTS` in its own session, with the `inherited` files.

    Output goes into `log`, or to this terminal without one. Standard error goes into `errors`, if given.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdout=log,
        stderr=errors or (subprocess.STDOUT if log else None),
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        # A terminal sends Ctrl-C to its whole process group: only the launcher must get it, and forwards it.
        start_new_session=True,
    )


def clear(log_dir: Path) -> None:
    """Create the log directory, and remove the error files that ranks of an earlier run left there."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for old in [*log_dir.glob("rank-*.error"), *log_dir.glob("rank-*.lost")]:
        old.unlink(missing_ok=True)


class RankProcesses:
    """Consecutive ranks of a run, on this machine."""

    def __init__(self, ranks: range, log_dir: Path, silent_seconds: float, reaches_others: bool = False) -> None:
        """`log_dir`: where ranks leave the reason of their end, and all but rank 0 their output.

        `silent_seconds`: time without a sign of life after which a rank counts as stopped. `reaches_others`: the ranks also
        send weights to other machines.
        """
        self.ranks, self._log_dir = ranks, log_dir
        self._memory = MemoryWatch()
        self._reaches_others, self._limit = reaches_others, silent_seconds
        self._board = SignBoard(len(ranks))
        self._silences = [Silence() for _ in ranks]
        self._looked = 0.0
        self._meeting: Path | None = None
        self._words = {rank: LastWords(log_dir / f"rank-{rank}") for rank in ranks}
        self._processes: list[subprocess.Popen[bytes]] = []
        # The ranks hold the reading end. It closes when this process ends, in whatever way, and then they end too.
        self._alive, self._hold = os.pipe()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int] = (),
        terminal: tuple[IO[bytes] | None, IO[bytes] | None] = (None, None),
    ) -> None:
        """Start `python -m ARGUMENTS` once per rank, with the `inherited` files.

        `terminal` gets the output of rank 0; without it, this process's own terminal does.
        """
        together: dict[str, str] = {}
        if environment["WORLD_SIZE"] == str(len(self.ranks)):
            self._meeting = scratch_directory()
            together = on_one_machine(self._meeting, self._reaches_others)
        for local_rank, (rank, words) in enumerate(self._words.items()):
            variables = {
                **environment,
                **together,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(self.ranks)),
                _PIPE: str(self._alive),
                _LAUNCHER: str(os.getpid()),
                PULSE: f"{self._board.file}:{local_rank}",
                VARIABLE: str(words.file),
            }
            with contextlib.ExitStack() as opened:
                output, errors = terminal
                if rank:
                    output, errors = opened.enter_context((self._log_dir / f"rank-{rank}.log").open("wb")), None
                files = (self._alive, words.file, self._board.file, *inherited)
                self._processes.append(start_rank(arguments, variables, output, files, errors))
            os.close(words.file)
        os.close(self._alive)

    def codes(self) -> list[int | None]:
        """Returns the exit codes; None for ranks that still run."""
        return [process.poll() for process in self._processes]

    def send(self, number: int) -> None:
        """Send a signal to the ranks that still run."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def silent(self) -> list[Cause]:
        """Returns a cause for each rank that runs and has given no sign of life for too long."""
        now = time.monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return []
        self._looked = now
        causes = []
        for slot, (rank, process, silence) in enumerate(zip(self.ranks, self._processes, self._silences, strict=True)):
            sign, (state, cpu) = self._board.read(slot), _state(process.pid)
            # A thread that holds Python's lock (GIL) keeps the others from giving signs, but uses processor time. Before a
            # rank has joined, it may also read libraries from a slow disk. A debugger may hold it without limit.
            is_watched = state == "T" or (state != "t" and sign is not None and sign.has_joined)
            seconds = silence.look((sign and sign.number, cpu) if is_watched else now, now)
            if seconds > self._limit and process.poll() is None:
                doing = _STATES.get(state, "it runs, and does nothing")
                place = f", last seen {sign.place}" if sign is not None else ""
                message = (
                    f"rank {rank} on {socket.gethostname()} has given no sign of life for {seconds:.0f} s "
                    f"(launch.silent_seconds: {self._limit:g}); process {process.pid}: {doing}{place}"
                )
                causes.append(Cause(Kind.KILLED, rank, message, self._tail(rank)))
        return causes

    def causes(self) -> list[Cause]:
        """Returns why ranks ended, as far as is known; empty if all known ranks only lost another rank."""
        codes = {rank: code or 0 for rank, code in zip(self.ranks, self.codes(), strict=True)}
        host, causes = socket.gethostname(), []
        for rank, code in codes.items():
            if code < 0:
                pid = self._processes[self.ranks.index(rank)].pid
                message = f"rank {rank} on {host} {describe(pid, -code, self._memory)}"
                causes.append(Cause(Kind.KILLED, rank, message, self._tail(rank)))
        for rank, words in self._last_words("error"):
            causes.append(Cause(Kind.RAISED, words.when, f"rank {rank} failed:\n{words.text}"))
        lost = {rank for rank, _ in self._last_words("lost")}
        for rank, code in codes.items():
            if code > 0 and rank not in lost:
                message = f"rank {rank} on {host} ended with code {code} and left no traceback"
                causes.append(Cause(Kind.SILENT, rank, message, self._tail(rank)))
        return causes

    def losses(self) -> list[Cause]:
        """Returns the messages of ranks here that only lost another rank."""
        return [
            Cause(
                Kind.LOST,
                words.when,
                f"rank {rank} on {socket.gethostname()} lost a rank that is elsewhere, or that still runs; the reason "
                f"is in the output of that one:\n{words.text}",
            )
            for rank, words in self._last_words("lost")
        ]

    def _last_words(self, kind: str) -> list[tuple[int, Words]]:
        """Returns the last words of this kind, each with its rank."""
        return [
            (rank, words)
            for rank, words_of_rank in self._words.items()
            for words in words_of_rank.read()
            if words.kind == kind
        ]

    def _tail(self, rank: int) -> tuple[str, ...]:
        """Returns the end of a rank's log; empty for rank 0, which writes to the terminal."""
        log = self._log_dir / f"rank-{rank}.log"
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if rank and log.is_file() else []
        return ("the end of its log:", *lines) if lines else ()

    def close(self) -> None:
        """Kill all remaining ranks and what they started."""
        for process in self._processes:
            # The whole session is killed: it includes the rank's children.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            deadline = time.monotonic() + _LONGEST_END
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if process.poll() is None:
                print(f"note     process {process.pid} does not end: the kernel waits for a disk or a device", flush=True)
            remove_scratch(process.pid)
        for words in self._words.values():
            words.close()
        self._board.close()
        os.close(self._hold)
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)


def has_launcher() -> bool:
    """Returns whether this rank is one of `RankProcesses`."""
    return _PIPE in os.environ


def end_with_launcher() -> None:
    """End this rank when the process that started it ends, even by SIGKILL, and even if this rank is stopped."""
    if not has_launcher():
        return
    pipe, launcher = int(os.environ[_PIPE]), int(os.environ[_LAUNCHER])

    def wait() -> None:
        os.read(pipe, 1)
        try:
            for pid in (os.getpid(), launcher):
                remove_scratch(pid)
        finally:
            # The session includes everything that this rank started.
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    # The thread ends this rank and its children; SIGKILL from the kernel would leave the children. A stopped process runs no
    # thread, so the kernel first continues it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _state(pid: int) -> tuple[str, int]:
    """Returns the kernel's state letter of a process, and the processor time that it has used."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    return "", 0
