"""The ranks of one machine: spawned, watched, and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from fivefold.distributed.ports import free_port
from fivefold.launch.deaths import MemoryWatch, describe

FAILED = 1
ASKED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of ranks that ended because they were asked to."""
PAUSE = 2.0
"""Seconds after which a second Ctrl-C is a person's, and not the same one that reached a process by another way too."""
_REASON_SECONDS = 5.0
"""Time for the rank with the reason to be seen: one whose memory the kernel still takes apart has not ended yet."""
_LATE_SECONDS = 10.0
"""Between the first and the last rank that end because they were asked to; then the rest is killed."""
_GRACE_SECONDS = 3.0
"""Time ranks get to end by themselves after another one failed."""


def start_rank(
    arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None, inherited: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start `python -m ARGUMENTS` in a session of its own, which speaks into `log` and inherits these files."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        # A terminal sends Ctrl-C to its whole group: only the launcher shall get it and hand it on.
        start_new_session=True,
    )


def spawn(
    arguments: Sequence[str], world_size: int, log_dir: Path, threads: int | None, inherited: Sequence[int] = ()
) -> int:
    """Run `python -m ARGUMENTS` once a rank, with these files; the exit code of the run.

    Rank 0 speaks on this terminal, the others into `log_dir`. When one rank fails, its traceback is shown and the
    others are ended. SIGINT and SIGTERM are handed on, so that the ranks save and end; a second Ctrl-C, after a pause,
    ends them at once.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    for old in [*log_dir.glob("rank-*.error"), *log_dir.glob("rank-*.lost")]:
        old.unlink()
    memory = MemoryWatch()
    port = free_port()
    each = threads or max(1, (os.cpu_count() or 1) // world_size)
    # The ranks hold the reading end: it closes when this process ends in whatever way, and then they end too.
    alive, hold = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []
    first = 0.0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if signals and (number != signal.SIGINT or time.monotonic() < first + PAUSE):
            # The same request by another way: Slurm and systemd send it to every process.
            return
        signals.append(number)
        first = time.monotonic()
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if len(signals) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(each),
                "FIVEFOLD_LAUNCHER_PIPE": str(alive),
                "FIVEFOLD_LOG_DIR": str(log_dir),
            }
            with contextlib.ExitStack() as opened:
                log = opened.enter_context((log_dir / f"rank-{rank}.log").open("wb")) if rank else None
                processes.append(start_rank(arguments, environment, log, (alive, *inherited)))
        os.close(alive)
        if signals:
            # Ranks that were started after the request have not got it; others take it once.
            for process in processes:
                process.terminate()
        return _watch(processes, log_dir, signals, memory)
    finally:
        for process in processes:
            # The rank's session: what it started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(hold)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(processes: list[subprocess.Popen[bytes]], log_dir: Path, signals: list[int], memory: MemoryWatch) -> int:
    first_end: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        if signals and first_end is None and any(code is not None for code in codes):
            first_end = time.monotonic()
        if any(code not in (None, 0, *ASKED) for code in codes) and len(signals) < 2:
            # Ranks that lose their partner fail too, and now and then they are seen first.
            deadline = time.monotonic() + _REASON_SECONDS
            while (reason := _reason(processes, log_dir, memory)) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            print(f"\n{reason or _losses(processes, log_dir)}", file=sys.stderr, flush=True)
            _end(processes)
            return FAILED
        # Ranks end together. One that ended before they were joined leaves others in a wait that no signal's handler breaks.
        is_late = first_end is not None and time.monotonic() > first_end + _LATE_SECONDS
        if is_late or all(code is not None for code in codes):
            return 128 + signals[0] if signals else max(code or 0 for code in codes)
        time.sleep(0.1)


def _reason(processes: list[subprocess.Popen[bytes]], log_dir: Path, memory: MemoryWatch) -> str | None:
    """Why the run ends: the ranks that were killed, or the traceback of the one that failed first; None as long as all that
    is seen are ranks that lost another one."""
    codes = [process.poll() or 0 for process in processes]
    host = socket.gethostname()
    killed = [(rank, -code) for rank, code in enumerate(codes) if code < 0]
    if killed:
        told = [f"rank {rank} on {host} {describe(processes[rank].pid, number, memory)}" for rank, number in killed]
        return "\n".join([*told, *_tail(log_dir, killed[0][0])])
    errors = sorted(log_dir.glob("rank-*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        return f"rank {_rank_of(errors[0])} failed:\n{errors[0].read_text()}"
    lost = {_rank_of(path) for path in log_dir.glob("rank-*.lost")}
    for rank, code in enumerate(codes):
        if code and rank not in lost:
            said = f"rank {rank} on {host} ended with code {code} and left no traceback"
            return "\n".join([said, *_tail(log_dir, rank)])
    return None


def _losses(processes: list[subprocess.Popen[bytes]], log_dir: Path) -> str:
    """What is known where every rank that failed here only lost another one."""
    (first, *_) = sorted(log_dir.glob("rank-*.lost"), key=lambda path: path.stat().st_mtime_ns)
    return (
        f"rank {_rank_of(first)} on {socket.gethostname()} lost a rank that is elsewhere, or that still runs; the reason "
        f"stands where that one ended:\n{first.read_text()}"
    )


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _tail(log_dir: Path, rank: int) -> list[str]:
    """The end of a rank's log; rank 0 has none, it speaks on the terminal."""
    log = log_dir / f"rank-{rank}.log"
    lines = log.read_text(errors="replace").splitlines()[-20:] if rank and log.is_file() else []
    return ["the end of its log:", *lines] if lines else []


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def has_launcher() -> bool:
    """This rank was started by `spawn`."""
    return "FIVEFOLD_LAUNCHER_PIPE" in os.environ


def end_with_launcher() -> None:
    """End this rank when the process that spawned it ends, even by SIGKILL."""
    pipe = os.environ.get("FIVEFOLD_LAUNCHER_PIPE")
    if pipe is None:
        return

    def wait() -> None:
        os.read(int(pipe), 1)
        # Everything that this rank started is in its session.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
