"""Files whose every byte is covered by a sum: what is read is what was written, or the file is named. No torch here.

A file of tensors has the sums of its data in its header, a block at a time, so that a rank checks exactly what it reads. The
sums of headers, and of all other files, are in a checkpoint's manifest.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_64_hexdigest

T = TypeVar("T")

BLOCK = 2**21
"""Bytes of a sum of its own: small enough that a rank which reads a part of a tensor checks little else."""
SUM_LETTERS = 16
SUMS = "sums"
"""Key of a header's metadata: the sums of all blocks of all tensors, in the order of the tensors' bytes."""
_PAUSES = (0.2, 1.0, 4.0)
"""Seconds before a read that failed is repeated."""
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.ENOTCONN, errno.EREMOTEIO)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_LONGEST_HEADER = 2**30


class DamagedFile(ValueError):  # noqa: N818 - it names what was found, as the messages do
    """A file does not hold what was written."""


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    entries: dict[str, Any]
    metadata: dict[str, Any]
    size: int
    """Bytes before the tensors' data."""


def sum_of(data: Any) -> str:
    """XXH3 (64 bits) of an object of bytes, in 16 hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def block_sums(data: memoryview) -> str:
    """The sums of the blocks of a tensor's bytes, one after another."""
    return "".join(sum_of(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK))


def count_blocks(size: int) -> int:
    """Blocks of a tensor of so many bytes."""
    return -(-size // BLOCK)


def read_part(path: Path, size: int | None = None) -> bytes:
    """The first `size` bytes of a file, or all of it.

    Raises DamagedFile where there is no such file, and OSError where it cannot be read, after some attempts.
    """

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(-1 if size is None else size)

    return repeat_io(read, path)


def fill(path: Path, begin: int, into: memoryview) -> None:
    """Read a file's bytes from `begin` on into memory; raises DamagedFile where the file ends before, otherwise as
    `read_part` does."""

    def read() -> None:
        filled = 0
        with path.open("rb", buffering=0) as file:
            while filled < len(into):
                count = os.preadv(file.fileno(), [into[filled:]], begin + filled)
                if not count:
                    raise DamagedFile(f"{path} is cut off: it ends at byte {begin + filled}")
                filled += count

    repeat_io(read, path)


def repeat_io(read: Callable[[], T], path: Path) -> T:
    """What `read` returns. An input or output error is no damage: it is repeated, and then it is the error of the caller."""
    for pause in (*_PAUSES, None):
        try:
            return read()
        except OSError as error:
            if error.errno in _ABSENT:
                raise DamagedFile(f"{path} is missing") from error
            if error.errno not in _PASSING or pause is None:
                # What read(2) raises has no name of a file.
                raise OSError(error.errno, error.strerror, str(path)) from error
            print(f"note     {path}: {error.strerror}; reading it again", flush=True)
            time.sleep(pause)
    raise AssertionError("unreachable")


def read_header(path: Path) -> Header:
    """The header of a safetensors file; raises DamagedFile where there is none."""
    length = int.from_bytes(read_part(path, 8), "little")
    size = repeat_io(path.stat, path).st_size
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise DamagedFile(f"{path} is no whole safetensors file: it has {size} bytes, its header would have {length}")
    try:
        entries = json.loads(read_part(path, 8 + length)[8:])
        metadata = entries.pop("__metadata__", {})
        return Header(entries, dict(metadata), 8 + length)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path} is no safetensors file: its header is not a JSON object") from error


def covered_by_manifest(path: Path) -> int:
    """First bytes of a file that no sum within it covers: the header of a file of tensors with sums, otherwise all."""
    if path.suffix == ".safetensors":
        header = read_header(path)
        if SUMS in header.metadata:
            return header.size
    return path.stat().st_size
