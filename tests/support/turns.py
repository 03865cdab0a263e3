"""`make test-by-turns`: the long test targets whose turn it is.

A commit's hash chooses the first target of tests/turns.txt; the following ones run as long as their time allows.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TURNS = ROOT / "tests/turns.txt"
LONGEST = 8.0
"""Minutes that a target may take on two idle cores."""
GRACE = 20.0
"""Seconds that pytest has to print its summary after an interrupt."""


def targets() -> list[str]:
    """Arguments of `make` for each long target, in order."""
    lines = (line.partition("#")[0].strip() for line in TURNS.read_text().splitlines())
    return [line for line in lines if line]


def in_turn(commit: str) -> list[str]:
    """All targets, beginning with the one that a commit's hash chooses."""
    every = targets()
    first = int(commit, 16) % len(every)
    return every[first:] + every[:first]


def run(target: str, seconds: float, root: Path = ROOT) -> tuple[bool, bool]:
    """(no test failed, the target ended by itself) of `make TARGET`, interrupted after some seconds."""
    process = subprocess.Popen(
        ["make", "--no-print-directory", *target.split()], cwd=root, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    signals = [(deadline, signal.SIGINT), (deadline + GRACE, signal.SIGKILL)]
    os.set_blocking(process.stdout.fileno(), False)
    output, ended = "", True
    while process.poll() is None:
        output += _forward(process.stdout.fileno())
        if signals and time.monotonic() > signals[0][0]:
            ended = False
            os.killpg(process.pid, signals.pop(0)[1])
        time.sleep(0.2)
    output += _forward(process.stdout.fileno())
    return process.returncode == 0 if ended else " failed" not in output and " error" not in output, ended


def _forward(descriptor: int) -> str:
    """Print what a target has written since, and return it."""
    written = b""
    while True:
        try:
            piece = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            break
        if not piece:
            break
        written += piece
    text = written.decode(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="run targets for at most so long; 0 runs all of them")
    arguments = parser.parse_args()
    if arguments.minutes:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        chosen, left = in_turn(commit.strip()), 60 * arguments.minutes
    else:
        chosen, left = targets(), float("inf")
    failed: list[str] = []
    for place, target in enumerate(chosen):
        if place and left < 60 * LONGEST:
            break
        print(f"=== make {target}", flush=True)
        begin = time.monotonic()
        passed, ended = run(target, left)
        seconds = time.monotonic() - begin
        left -= seconds
        verdict = ("passed" if ended else "no failure until it was cut off") if passed else "FAILED"
        print(f"=== make {target}: {verdict} after {seconds:.0f} s", flush=True)
        failed += [] if passed else [target]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
