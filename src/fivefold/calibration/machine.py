"""Measures this machine within a time limit, each part in a separate process: -> Rates in a file. No torch here.

A process frees its memory when it ends, and one that hangs within the driver or NCCL is abandoned.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fivefold.errors import UserError, shown
from fivefold.plan.efficiency import CALIBRATION, write_calibration
from fivefold.plan.measured import Rate

PARTS = {"kernels": 0.25, "links": 0.3, "layers": 1.0}
"""Part -> the maximum share of the remaining time that it may take; later parts get what earlier ones leave."""
_LEAST = 20.0
"""Seconds that each part may take whatever its share is: it starts processes, which import torch."""
_GRACE = 5.0
"""Seconds after its limit in which a part may end by itself."""


def calibrate(path: Path | None = None, seconds: float = 120.0, tell: Callable[[str], None] = print) -> Path:
    """Measure what the time allows, write it to a file and return its path; kinds not measured keep the built-in rates.

    Takes at most `seconds`, even if a process hangs. Raises ValueError if nothing could be measured.
    """
    path = (path or CALIBRATION).expanduser()
    deadline, rows, faults = time.monotonic() + seconds, list[Rate](), list[str]()
    for part, share in PARTS.items():
        left = deadline - time.monotonic() - _GRACE
        limit = min(left, max(_LEAST, share * left))
        if limit <= 0:
            tell(f"{part}: not measured, the time is over")
            continue
        tell(f"{part}: at most {limit:.0f} seconds")
        for answer in _part(part, limit, rows):
            if "fault" in answer:
                faults.append(f"{part}: {answer['fault']}")
                tell(faults[-1])
            elif "note" in answer:
                tell(f"  {answer['note']}")
            else:
                rows.append(Rate(**answer))
                tell(f"  {rows[-1].kind:<26}{rows[-1].size:>14,.0f}{rows[-1].rate:>14,.4g}")
    if not rows:
        raise UserError("; ".join(faults) or f"nothing could be measured in {seconds:g} seconds: give more with --seconds")
    write_calibration(path, rows, rows[0].source)
    return path


def _part(name: str, seconds: float, earlier: Sequence[Rate]) -> Iterator[dict[str, Any]]:
    """Yield rows as they are measured, a `note` of what is left out, and a `fault` if the part failed."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fivefold-", ignore_cleanup_errors=True) as directory:
        errors = Path(directory) / "errors"
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "fivefold.calibration.part", name, str(deadline)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, start_new_session=True,
                # Same value as in the launcher; CUDA reads it when it starts.
                env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TMPDIR": directory},
            )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            # A process that has already ended reads nothing; the reason it printed is reported below.
            with contextlib.suppress(BrokenPipeError), process.stdin as known:
                known.write(json.dumps([asdict(row) for row in earlier]).encode())
            for line in _lines(process.stdout, deadline + _GRACE):
                yield json.loads(line)
            if process.wait(_GRACE):
                text = errors.read_text(errors="replace").strip().splitlines()
                yield {
                    "fault": f"it ended with {process.returncode}: {shown(text[-1] if text else 'it printed nothing', 200)}"
                }
        except (TimeoutError, subprocess.TimeoutExpired):
            yield {"fault": f"stopped, it did not end within {seconds:.0f} seconds"}
        finally:
            # Also kills the ranks it started. No wait: a process within a driver call ends when the call returns, if ever.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _lines(output: IO[bytes], deadline: float) -> Iterator[bytes]:
    """Yield the lines printed until the output is closed; raises TimeoutError at the deadline."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        for line in output:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        yield line
