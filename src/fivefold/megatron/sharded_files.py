"""Tensors in pieces: every rank writes a safetensors file of its own, and any rank reads any part of any tensor.

A piece is a box of a tensor that has the same name and shape on every layout. Files are plain safetensors; which box a piece
is stands in their metadata.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.files import writing

Shape = tuple[int, ...]
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}
_TYPES = {code: kind for kind, code in _CODES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Box:
    """A part of a tensor along its axes."""

    offset: Shape
    size: Shape

    def __and__(self, other: Box) -> Box | None:
        """What two boxes share."""
        first = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)]
        size = tuple(end - begin for begin, end in zip(first, ends, strict=True))
        return Box(first, size) if all(length > 0 for length in size) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in the data of a box around it."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.size, strict=True))


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name` with its values."""

    name: str
    box: Box
    values: Tensor


def boxes_of_range(shape: Shape, begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """The boxes of [begin, end) of a tensor's numbers in their order, with the place of each one's first number.

    A range is not a box: it is part of a row, whole rows, and part of another.
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ()), begin
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        yield from _within_row(shape, first - 1, begin, end)
        return
    yield from _within_row(shape, first - 1, begin, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])), first * row
    yield from _within_row(shape, last, last * row, end)


def _within_row(shape: Shape, row: int, begin: int, end: int) -> Iterator[tuple[Box, int]]:
    before = row * math.prod(shape[1:])
    for box, first in boxes_of_range(shape[1:], begin - before, end - before):
        yield Box((row, *box.offset), (1, *box.size)), first + before


def write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write them as a safetensors file; a piece at a time is copied to the host."""
    # safetensors have no gaps: the wider types first, and every number lies where its type wants it.
    chosen = sorted(pieces, key=lambda piece: -piece.values.element_size())
    header: dict[str, object] = {
        "__metadata__": {"pieces": json.dumps([[piece.name, piece.box.offset, piece.box.size] for piece in chosen])}
    }
    end = 0
    for number, piece in enumerate(chosen):
        begin, end = end, end + piece.values.nbytes
        header[str(number)] = {"dtype": _CODES[piece.values.dtype], "shape": piece.box.size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with writing(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for piece in chosen:
            file.write(piece.values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


class PieceReader:
    """The pieces of all files of a directory."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError where a file is not one of pieces."""
        self._directory = directory
        self._found: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
        for path in sorted(directory.glob("*.safetensors")):
            for piece in _pieces_of(path):
                self._found[piece.name].append((piece.box, piece.values))

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Read a box of a tensor into `values`; raises ValueError where files do not hold all of it."""
        filled = 0
        for there, data in self._found.get(name, ()):
            if shared := box & there:
                values[shared.within(box)].copy_(data[shared.within(there)])
                filled += math.prod(shared.size)
        if filled != math.prod(box.size):
            raise ValueError(
                f"{self._directory} holds {filled} of the {math.prod(box.size)} numbers of {name} at {box.offset}: it was "
                "written for another model, or files are missing"
            )


def _pieces_of(path: Path) -> Iterator[Piece]:
    """Mapped, not read: only what is asked for comes from the disk."""
    with path.open("rb") as file:
        # Private: a page that somebody writes to is a copy.
        data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        for number, (name, offset, size) in enumerate(json.loads(header["__metadata__"]["pieces"])):
            entry = header[str(number)]
            kind, (first, last) = _TYPES[entry["dtype"]], entry["data_offsets"]
            values = torch.frombuffer(data, dtype=torch.uint8, count=last - first, offset=begin + first).view(kind)
            yield Piece(name, Box(tuple(offset), tuple(size)), values.view(size))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} holds no pieces of tensors: {error}") from error
