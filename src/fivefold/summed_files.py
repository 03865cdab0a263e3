"""Files with checksums for every byte: reads return what was written, or an error names the file. No torch here.

A tensor file has the checksums of its data in its header, one per block, so that a rank verifies exactly what it reads. A
checkpoint's manifest has the checksums of headers and of all other files.
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

from fivefold.errors import UserError

T = TypeVar("T")

BLOCK = 2**21
"""Number of bytes per checksum: small enough that a rank which reads a part of a tensor verifies little else."""
SUM_LETTERS = 16
SUMS = "sums"
"""Metadata key of the checksums of all blocks of all tensors, in the order of the tensors' bytes."""
_PAUSES = (0.2, 1.0, 4.0)
"""Seconds to wait before a failed read is retried."""
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.ENOTCONN, errno.EREMOTEIO)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_LONGEST_HEADER = 2**30


class DamagedFile(UserError):  # noqa: N818 - it names what was found, as the messages do
    """A file that does not contain what was written."""


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    entries: dict[str, Any]
    metadata: dict[str, Any]
    size: int
    """Number of bytes before the tensors' data."""


def sum_of(data: Any) -> str:
    """Return the XXH3 (64 bits) of a bytes-like object, as 16 hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def block_sums(data: memoryview) -> str:
    """Return the concatenated checksums of the blocks of a tensor's bytes."""
    return "".join(sum_of(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK))


def count_blocks(size: int) -> int:
    """Return the number of blocks in a tensor of `size` bytes."""
    return -(-size // BLOCK)


def read_part(path: Path, size: int | None = None) -> bytes:
    """Read the first `size` bytes of a file, or all of it.

    Raises DamagedFile if there is no such file, and OSError if it cannot be read after several attempts.
    """

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(-1 if size is None else size)

    return repeat_io(read, path)


def fill(path: Path, begin: int, into: memoryview) -> None:
    """Read a file's bytes from `begin` on into memory; raises DamagedFile if the file ends too early, and errors as
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
    """Return the result of `read`. Input and output errors are retried first; they do not mean that the file is damaged."""
    for pause in (*_PAUSES, None):
        try:
            return read()
        except OSError as error:
            if error.errno in _ABSENT:
                raise DamagedFile(f"{path} is missing") from error
            if error.errno not in _PASSING or pause is None:
                # An error of read(2) has no file name.
                raise OSError(error.errno, error.strerror, str(path)) from error
            print(f"note     {path}: {error.strerror}; reading it again", flush=True)
            time.sleep(pause)
    raise AssertionError("unreachable")


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file; raises DamagedFile if there is none."""
    length = int.from_bytes(read_part(path, 8), "little")
    size = repeat_io(path.stat, path).st_size
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise DamagedFile(f"{path} is not a complete safetensors file: it has {size} bytes, its header would have {length}")
    try:
        entries = json.loads(read_part(path, 8 + length)[8:])
        metadata = entries.pop("__metadata__", {})
        return Header(entries, dict(metadata), 8 + length)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path} is not a safetensors file: its header is not a JSON object") from error


def covered_by_manifest(path: Path) -> int:
    """Return the number of leading bytes that no checksum in the file covers: the header if the tensors have sums, otherwise
    all."""
    if path.suffix == ".safetensors":
        header = read_header(path)
        if SUMS in header.metadata:
            return header.size
    return path.stat().st_size
