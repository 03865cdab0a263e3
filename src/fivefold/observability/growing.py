"""Reader of files with one JSON object per line that a run is still writing: returns the rows added since the last read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_LARGEST = 1.7e308


class GrowingRows:
    """Reads a growing file and remembers its position. It never waits and never fails.

    An incomplete last line is left for the next read; a damaged line is skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that was read last."""

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the added rows, and whether all earlier rows are void because a resumed run has moved some of them."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_other = self._file is not None and (
                    (status.st_dev, status.st_ino) != self._file or status.st_size < self._at
                )
                if is_other:
                    self._at = 0
                self._file = (status.st_dev, status.st_ino)
                file.seek(self._at)
                content = file.read()
        except OSError:
            was_there, self._file, self._at = self._file is not None, None, 0
            return [], was_there
        lines = content[: content.rfind(b"\n") + 1]
        self._at += len(lines)
        return [row for line in lines.split(b"\n") if (row := _row(line)) is not None], is_other


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a row that are finite numbers or null; other entries are not shown."""
    return {name: value for name, value in row.items() if value is None or is_number(value)}


def is_number(value: Any) -> bool:
    """Return whether the value is a finite number that fits in a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line if it has a step number."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    # Values per token are for programs that audit a run.
    row.pop("tokens", None)
    return row
