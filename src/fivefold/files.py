"""Reads files from users and other programs: path -> text, JSON, lines. A ValueError names the file that cannot be read.

Also writes files in a run's directory: never through a symbolic link, and atomically if others may be reading.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown


def read_text(path: Path, most: int | None = None) -> str:
    """Read the UTF-8 text of a file; with `most`, of a regular file of at most so many bytes."""
    try:
        if most is not None and not _holds_at_most(path, most):
            return ""
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return _decode(content, str(path))


def read_json(path: Path) -> Any:
    """Read the value in a JSON file."""
    return _parse(read_text(path), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object: got {shown(content)}")
    return content


LONGEST_LINE = 16 * 2**20
"""Maximum length of a JSON line in bytes; parsed, it takes several times as much memory."""


def read_json_lines(path: Path, growing: bool = False, unique: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, object) for each non-empty line; only a newline ends a line.

    The last line of a `growing` file may be incomplete: it is left out if it has no newline. With `unique`, an object with
    duplicate keys is refused.
    """
    try:
        # Text files also end lines at \r, and str.splitlines at U+2028; bytes only at \n.
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), 1):
                where = f"{path}, line {number}"
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{where} must have at most {LONGEST_LINE // 2**20} MiB: it is longer")
                if not line.strip() or (growing and not line.endswith(b"\n")):
                    continue
                row = _parse(_decode(line, where), where, _unique if unique else None)
                if not isinstance(row, dict):
                    raise UserError(f"{where} must hold a JSON object: got {shown(row)}")
                yield number, row
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def open_file(path: Path, flags: int) -> int:
    """Open a file with these flags of `os.open`; raises ValueError for a symbolic link. Child processes do not inherit
    it."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a symbolic link, to which a run does not write; remove it") from error
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that readers never see a part of it; replaces a symbolic link at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with (
        writing(new),
        os.fdopen(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file,
    ):
        file.write(text)
    new.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text; an error names the file."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the name of the written file to system errors within this block: a full disk's error has none.

    The safetensors library has its own class for such errors, with the error number in the message.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        number = re.search(r"\(os error ([0-9]+)\)|code: ([0-9]+)", str(error))
        if number is None or type(error).__name__ != "SafetensorError":
            raise
        code = int(number[1] or number[2])
        raise OSError(code, os.strerror(code), str(path)) from error


_UMASK = "FIVEFOLD_USERS_UMASK"
"""Environment variable with the umask from before `use_umask`; child processes inherit it."""


@contextmanager
def with_umask(text: str) -> Iterator[int]:
    """Remove these permissions from new files within this block: three octal digits; gives the umask from before."""
    before = os.umask(int(text, 8))
    try:
        yield before
    finally:
        os.umask(before)


def use_umask(text: str) -> None:
    """Remove these permissions from new files of this process and its child processes: three octal digits."""
    before = os.umask(int(text, 8))
    os.environ.setdefault(_UMASK, f"{before:o}")


@contextmanager
def run_umask(text: str) -> Iterator[None]:
    """`use_umask` within this block only, so that a program that trains keeps its own permissions afterwards."""
    users = os.environ.get(_UMASK)
    with with_umask(text) as before:
        os.environ.setdefault(_UMASK, f"{before:o}")
        try:
            yield
        finally:
            if users is None:
                del os.environ[_UMASK]


@contextmanager
def users_umask() -> Iterator[None]:
    """Within this block, new files have the user's usual permissions, because caches are shared."""
    if (users := os.environ.get(_UMASK)) is None:
        yield
        return
    with with_umask(users):
        yield


def user_cache(name: str) -> Path:
    """Return our directory of this name in the user's cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fivefold" / name


def _holds_at_most(path: Path, most: int) -> bool:
    """Whether a file has bytes to read; raises ValueError for more than `most`, or if it is not a regular file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file")
    if status.st_size > most:
        raise UserError(f"{path} has {status.st_size} bytes: at most {most} are read")
    # Files in /proc report size 0, and reading them may never end.
    return status.st_size > 0


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        inside = f", line {line}" if b"\n" in content.rstrip() else ""
        raise UserError(
            f"{where}{inside} is not UTF-8 text: byte {content[error.start]:#x} at {error.start}; save it as UTF-8"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from its keys and values; raises ValueError for a duplicate key."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise UserError(f"the key {shown(twice[0])} is given twice: leave one of them out")
    return mapping


def _parse(text: str, where: str, make: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=make)
    except RecursionError as error:
        raise UserError(f"{where} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
