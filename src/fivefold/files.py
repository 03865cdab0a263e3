"""Files that people and other programs wrote: path -> text, JSON, lines; a ValueError names the file that cannot be read.

And one way to write a file that others may be reading."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.errors import shown


def read_text(path: Path, most: int | None = None) -> str:
    """The UTF-8 text of a file; with `most`, of a regular file of at most so many bytes."""
    try:
        if most is not None and not _holds_at_most(path, most):
            return ""
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return _decode(content, str(path))


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return _parse(read_text(path), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object: got {shown(found)}")
    return found


def read_json_lines(path: Path, growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of each line that is not empty; lines end at a newline and nothing else.

    Of a file that is `growing` the last line may still be in writing: it is left out where it has no end.
    """
    try:
        # Text files end their lines at \r too, and str.splitlines at U+2028; bytes at \n only.
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if not line.strip() or (growing and not line.endswith(b"\n")):
                    continue
                row = _parse(_decode(line, where), where)
                if not isinstance(row, dict):
                    raise ValueError(f"{where} must hold a JSON object: got {shown(row)}")
                yield number, row
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file of which no reader sees a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _holds_at_most(path: Path, most: int) -> bool:
    """Whether a file has bytes to read; raises ValueError for more than `most`, or for no regular file."""
    there = path.stat()
    if not stat.S_ISREG(there.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if there.st_size > most:
        raise ValueError(f"{path} has {there.st_size} bytes: at most {most} are read")
    # A file of /proc says that it is empty, and reading it may never end.
    return there.st_size > 0


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        inside = f", line {line}" if b"\n" in content.rstrip() else ""
        raise ValueError(
            f"{where}{inside} is not UTF-8 text: byte {content[error.start]:#x} at {error.start}; save it as UTF-8"
        ) from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
