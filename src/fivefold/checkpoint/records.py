"""Record files that grow with each step, on resume: rows to keep, rows to move aside, unreadable lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

SAMPLES = ("samples.jsonl", "transcripts.jsonl")
RECORDS = ("metrics.jsonl", *SAMPLES, "trace/stages.jsonl", "warnings.jsonl")


def move_rows(path: Path, last: int, aside: Path, warn: Callable[[str], None]) -> None:
    """Move the rows of steps after `last` to the file `aside`; a resumed run writes them again.

    Lines that are not such rows go to the file `NAME.unreadable` in the same directory, and `warn` names them.
    """
    if not path.is_file():
        return
    rows: list[bytes] = []
    moved: list[bytes] = []
    unreadable: dict[int, bytes] = {}
    # Split bytes, not text: text has further line separators, bytes only newlines.
    content = path.read_bytes()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        if (step := _step_of(line)) is None:
            unreadable[number] = line
        else:
            (rows if step <= last else moved).append(line)
    if _joined(rows) == content:
        return
    if moved:
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(_joined(moved))
    if unreadable:
        aside = path.with_name(f"{path.name}.unreadable")
        with aside.open("ab") as file:
            file.write(_joined(unreadable.values()))
            file.flush()
            os.fsync(file.fileno())
        lines = f"line{'s' * (len(unreadable) > 1)} {', '.join(map(str, list(unreadable)[:5]))}"
        more = f" and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
        warn(f"{path}: {lines}{more} must be a JSON object with the number of a step: kept in {aside}")
    # Write a new file and rename it, so that a kill in between does not lose the kept rows.
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(_joined(rows))
    partial.replace(path)


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _step_of(line: bytes) -> int | None:
    """Return the step of a row; None if the line is not a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
