"""Manifest of a checkpoint: its files, and a checksum of every byte that no checksum within a file covers. No torch here.

The format is `{"files": {name: [size, number of leading bytes that the sum covers, sum]}, "sum": sum of the list itself}`.
For tensor files the leading bytes are the header. It contains the checksums of the data, which ranks verify while they read
it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fivefold.errors import shown
from fivefold.summed_files import DamagedFile, covered_by_manifest, read_part, repeat_io, sum_of

MANIFEST = "manifest.json"
Entry = list[Any]
"""[size, number of leading bytes that the sum covers, sum] of a file."""
_READ_BY_PATTERN = (".safetensors", ".json")
"""File name suffixes that readers search for in the directories of a checkpoint."""
_ENDS_BYTES = 16 * 2**20


def entry_of(path: Path) -> Entry:
    """Return the manifest entry of a file as it is on disk."""
    covered = covered_by_manifest(path)
    return [path.stat().st_size, covered, sum_of(read_part(path, covered))]


@dataclass(frozen=True)
class Manifest:
    """Files of a checkpoint by name."""

    files: Mapping[str, Entry]
    is_partial: bool = False
    """Whether it is from an older version, which has the sum of only both ends for files above 32 MiB."""

    @property
    def text(self) -> str:
        """Content of the manifest file."""
        return json.dumps({"files": self.files, "sum": sum_of(json.dumps(self.files).encode())}, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint; raises DamagedFile if it differs from what was written."""
        content = read_part(directory / MANIFEST)
        try:
            text = content.decode()
            manifest = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedFile(f"{MANIFEST} cannot be read: it is not JSON") from error
        files = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(files, dict) or not all(map(_is_inside, files)):
            raise DamagedFile(f"{MANIFEST} must have a list of files: got {shown(manifest)}")
        if set(manifest) == {"files"} and files and all(map(_is_old_entry, files.values())):
            return cls(files, is_partial=True)
        if not all(map(_is_entry, files.values())) or cls(files).text != text:
            raise DamagedFile(f"{MANIFEST} has other content than was written")
        return cls(files)

    def check(self, directory: Path) -> None:
        """Raise DamagedFile for the first file that differs from its entry, or that has none."""
        for name, (size, *rest) in self.files.items():
            path = directory / name
            status = repeat_io(path.stat, path)
            if not path.is_file():
                raise DamagedFile(f"{name} is missing: it is no file")
            if status.st_size != size:
                raise DamagedFile(f"{name} has {status.st_size} bytes instead of {size}")
            if (sum_of_ends(path) if self.is_partial else sum_of(read_part(path, rest[0]))) != rest[-1]:
                raise DamagedFile(f"{name} has other content than was written")
        for path in sorted(directory.glob("*/*")):
            if path.suffix in _READ_BY_PATTERN and path.relative_to(directory).as_posix() not in self.files:
                raise DamagedFile(f"{path.relative_to(directory)} was not written with it: remove it")


def find_corruption(directory: Path) -> str:
    """Return what is wrong with a checkpoint, or an empty text. Tensor data is checked when it is read.

    Raises OSError if a file cannot be read, since that does not mean that its content is damaged.
    """
    if not directory.is_dir():
        return "there is no such directory"
    try:
        Manifest.read(directory).check(directory)
    except DamagedFile as error:
        return str(error).replace(f"{directory}/", "")
    return ""


def sum_of_ends(path: Path) -> int:
    """CRC-32 of a file's first and last 16 MiB: the whole file up to 32 MiB; a sum of all of a large file takes minutes."""

    def read() -> int:
        with path.open("rb") as file:
            value = zlib.crc32(file.read(_ENDS_BYTES))
            if path.stat().st_size > 2 * _ENDS_BYTES:
                file.seek(-_ENDS_BYTES, 2)
            return zlib.crc32(file.read(_ENDS_BYTES), value)

    return repeat_io(read, path)


def _is_inside(name: str) -> bool:
    """Whether a name is a path within the checkpoint."""
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and [type(item) for item in entry] == [int, int, str]


def _is_old_entry(entry: Any) -> bool:
    return isinstance(entry, list) and [type(item) for item in entry] == [int, int]
