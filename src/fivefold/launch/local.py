"""The ranks of one machine: spawned, watched, and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from fivefold.distributed.ports import free_port

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FAILED = 1
_GRACE_SECONDS = 3.0
"""Time ranks get to end by themselves after another one failed."""


def launched_externally() -> bool:
    """This process is already a rank that torchrun, Slurm or Kubernetes started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_rank(
    arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None, alive: int
) -> subprocess.Popen[bytes]:
    """Start `python -m ARGUMENTS` in a session of its own, which speaks into `log` and inherits the file `alive`."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        stdin=subprocess.DEVNULL,
        pass_fds=(alive,),
        # A terminal sends Ctrl-C to its whole group: only the launcher shall get it and hand it on.
        start_new_session=True,
    )


def spawn(arguments: Sequence[str], world_size: int, log_dir: Path, threads: int | None) -> int:
    """Run `python -m ARGUMENTS` once a rank; the exit code of the run.

    Rank 0 speaks on this terminal, the others into `log_dir`. When one rank fails, its traceback is shown and the
    others are ended. SIGINT and SIGTERM are handed on, so that the ranks save and end; a second one ends them at once.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    for old in log_dir.glob("rank-*.error"):
        old.unlink()
    port = free_port()
    each = threads or max(1, (os.cpu_count() or 1) // world_size)
    # The ranks hold the reading end: it closes when this process ends in whatever way, and then they end too.
    alive, hold = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
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
                # Megatron-Core overlaps communication with computation by the order of kernels on one queue.
                "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            }
            with contextlib.ExitStack() as opened:
                log = opened.enter_context((log_dir / f"rank-{rank}.log").open("wb")) if rank else None
                processes.append(start_rank(arguments, environment, log, alive))
        os.close(alive)
        return _watch(processes, log_dir, signals)
    finally:
        for process in processes:
            # The rank's session: what it started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(hold)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(processes: list[subprocess.Popen[bytes]], log_dir: Path, signals: list[int]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        # Ranks that were asked to end say so in their exit code.
        good = (None, 0, 128 + signal.SIGTERM) if signals else (None, 0)
        bad = [(rank, code) for rank, code in enumerate(codes) if code not in good]
        if bad and len(signals) < 2:
            # Ranks that lose their partner fail too, a moment later: the first to fail has the reason.
            time.sleep(0.3)
            _report(log_dir, bad[0])
            _end(processes)
            return FAILED
        if all(code is not None for code in codes):
            return 128 + signals[0] if signals else 0
        time.sleep(0.1)


def _report(log_dir: Path, seen: tuple[int, int | None]) -> None:
    """Show the traceback of the rank that failed first."""
    errors = sorted(log_dir.glob("rank-*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        rank = errors[0].stem.split("-")[1]
        print(f"\nrank {rank} failed:\n{errors[0].read_text()}", file=sys.stderr, flush=True)
        return
    rank_number, code = seen
    text = f"rank {rank_number} ended with {'signal ' + str(-code) if code and code < 0 else 'code ' + str(code)}"
    log = log_dir / f"rank-{rank_number}.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.is_file() else ""
    print(f"\n{text} and left no traceback; the end of its log:\n{tail}", file=sys.stderr, flush=True)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


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
