"""The ranks of one machine as its processes: started, looked at, and ended. Every launcher of ours has them on a node."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from fivefold.distributed.scratch import remove_scratch
from fivefold.launch.deaths import MemoryWatch, describe
from fivefold.launch.last_words import VARIABLE, LastWords, Words
from fivefold.launch.watch import Cause, Kind

_LAST_LINES = 20


def start_rank(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes] | None,
    inherited: Sequence[int],
    errors: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m ARGUMENTS` in a session of its own, which speaks into `log` (where it has none, on this terminal) and
    inherits these files; what it writes to standard error goes into `errors`, if there is such a file."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdout=log,
        stderr=errors or (subprocess.STDOUT if log else None),
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        # A terminal sends Ctrl-C to its whole group: only the launcher shall get it and hand it on.
        start_new_session=True,
    )


def clear(log_dir: Path) -> None:
    """Make the directory, without what ranks of a run before left there of their ends."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for old in [*log_dir.glob("rank-*.error"), *log_dir.glob("rank-*.lost")]:
        old.unlink(missing_ok=True)


class RankProcesses:
    """Consecutive ranks of a run, on this machine."""

    def __init__(self, ranks: range, log_dir: Path) -> None:
        """`log_dir`: where they leave why they ended, and all but rank 0 what they say."""
        self.ranks, self._log_dir = ranks, log_dir
        self._memory = MemoryWatch()
        self._words = {rank: LastWords(log_dir / f"rank-{rank}") for rank in ranks}
        self._processes: list[subprocess.Popen[bytes]] = []
        # The ranks hold the reading end: it closes when this process ends in whatever way, and then they end too.
        self._alive, self._hold = os.pipe()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        inherited: Sequence[int] = (),
        terminal: tuple[IO[bytes] | None, IO[bytes] | None] = (None, None),
    ) -> None:
        """Start `python -m ARGUMENTS` once a rank, with these files. `terminal` gets what rank 0 says; this process's own
        where it is left out."""
        for local_rank, (rank, words) in enumerate(self._words.items()):
            own = {
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(self.ranks)),
                "FIVEFOLD_LAUNCHER_PIPE": str(self._alive),
                VARIABLE: str(words.file),
            }
            with contextlib.ExitStack() as opened:
                output, errors = terminal
                if rank:
                    output, errors = opened.enter_context((self._log_dir / f"rank-{rank}.log").open("wb")), None
                files = (self._alive, words.file, *inherited)
                self._processes.append(start_rank(arguments, own, output, files, errors))
            os.close(words.file)
        os.close(self._alive)

    def codes(self) -> list[int | None]:
        """Exit codes, None of those that run."""
        return [process.poll() for process in self._processes]

    def send(self, number: int) -> None:
        """Send a signal to those that run."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def causes(self) -> list[Cause]:
        """Why ranks ended, as far as it is seen; nothing as long as all that is seen are ranks that lost another one."""
        codes = {rank: code or 0 for rank, code in zip(self.ranks, self.codes(), strict=True)}
        host, found = socket.gethostname(), []
        for rank, code in codes.items():
            if code < 0:
                pid = self._processes[self.ranks.index(rank)].pid
                said = f"rank {rank} on {host} {describe(pid, -code, self._memory)}"
                found.append(Cause(Kind.KILLED, rank, said, self._tail(rank)))
        for rank, words in self._said("error"):
            found.append(Cause(Kind.RAISED, words.when, f"rank {rank} failed:\n{words.text}"))
        lost = {rank for rank, _ in self._said("lost")}
        for rank, code in codes.items():
            if code > 0 and rank not in lost:
                said = f"rank {rank} on {host} ended with code {code} and left no traceback"
                found.append(Cause(Kind.SILENT, rank, said, self._tail(rank)))
        return found

    def losses(self) -> list[Cause]:
        """What is known where every rank that failed here only lost another one."""
        return [
            Cause(
                Kind.LOST,
                words.when,
                f"rank {rank} on {socket.gethostname()} lost a rank that is elsewhere, or that still runs; the reason "
                f"stands where that one ended:\n{words.text}",
            )
            for rank, words in self._said("lost")
        ]

    def _said(self, kind: str) -> list[tuple[int, Words]]:
        """The last words of this kind, with whose they are."""
        return [(rank, words) for rank, each in self._words.items() for words in each.read() if words.kind == kind]

    def _tail(self, rank: int) -> tuple[str, ...]:
        """The end of a rank's log; rank 0 has none, it speaks on the terminal."""
        log = self._log_dir / f"rank-{rank}.log"
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if rank and log.is_file() else []
        return ("the end of its log:", *lines) if lines else ()

    def close(self) -> None:
        """Kill what is left of them."""
        for process in self._processes:
            # The rank's session: what it started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            remove_scratch(process.pid)
        for words in self._words.values():
            words.close()
        os.close(self._hold)


def has_launcher() -> bool:
    """This rank is one of `RankProcesses`."""
    return "FIVEFOLD_LAUNCHER_PIPE" in os.environ


def end_with_launcher() -> None:
    """End this rank when the process that started it ends, even by SIGKILL."""
    pipe = os.environ.get("FIVEFOLD_LAUNCHER_PIPE")
    if pipe is None:
        return

    def wait() -> None:
        os.read(int(pipe), 1)
        try:
            remove_scratch(os.getpid())
        finally:
            # Everything that this rank started is in its session.
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
