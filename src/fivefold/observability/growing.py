"""Files of one JSON object a line that a run is writing: what is new since the last look."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_LARGEST = 1.7e308


class GrowingRows:
    """A reader that remembers how far it has come. It never waits and never fails: a line that is half written is left for
    later, one that is damaged is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._file: tuple[int, int] | None = None
        """Device and number of the file that was read."""

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """Rows that were not there before, and whether those before are void: a resumed run has moved some away."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                is_other = self._file is not None and (
                    (found.st_dev, found.st_ino) != self._file or found.st_size < self._at
                )
                if is_other:
                    self._at = 0
                self._file = (found.st_dev, found.st_ino)
                file.seek(self._at)
                content = file.read()
        except OSError:
            was_there, self._file, self._at = self._file is not None, None, 0
            return [], was_there
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole)
        return [row for line in whole.split(b"\n") if (row := _row(line)) is not None], is_other


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The names of a row with finite numbers or null: whatever else a row has is not shown."""
    return {name: value for name, value in row.items() if value is None or is_number(value)}


def is_number(value: Any) -> bool:
    """Whether the value is a finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _row(line: bytes) -> dict[str, Any] | None:
    """The object of a line if it has the number of a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    # Numbers of every token are for programs that audit a run.
    row.pop("tokens", None)
    return row
