"""Tensors stored in pieces: every rank writes its own safetensors file, and any rank reads any part of any tensor.

A piece is a box of a tensor that has the same name and shape on every layout. The files are plain safetensors. Their
metadata lists the box of each piece, and a checksum of every block of the data.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.files import writing
from fivefold.summed_files import BLOCK, SUM_LETTERS, SUMS, DamagedFile, block_sums, count_blocks, fill, read_header, sum_of

Shape = tuple[int, ...]
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}
_TYPES = {code: kind for kind, code in _CODES.items()}
_ALIGNMENT = 8
_THREADS = 4
"""Largest number of threads in which a rank reads a tensor: a fast disk or the page cache gives more to several."""
_LEAST_BLOCKS = 4
"""Smallest number of blocks for which a thread is worth its start."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its offset and size along each axis."""

    offset: Shape
    size: Shape

    def __and__(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, None if it is empty."""
        first = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)]
        size = tuple(end - begin for begin, end in zip(first, ends, strict=True))
        return Box(first, size) if all(length > 0 for length in size) else None

    @property
    def corners(self) -> tuple[Shape, Shape]:
        """Indices of the box's first and last element in the whole tensor."""
        return self.offset, tuple(place + length - 1 for place, length in zip(self.offset, self.size, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in the data of a box around it."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.size, strict=True))


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name` with its values."""

    name: str
    box: Box
    values: Tensor


def boxes_of_range(shape: Shape, begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of elements [begin, end) of a tensor in row-major order, each with the index of its first element.

    A range is not a box: it is part of a row, whole rows, and part of another row.
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
    """Write the pieces as a safetensors file; one piece at a time is copied to the host and checksummed there."""
    # safetensors files have no gaps: wider types come first, so that every element is aligned.
    chosen = sorted(pieces, key=lambda piece: -piece.values.element_size())
    sums = ["0" * SUM_LETTERS * count_blocks(piece.values.nbytes) for piece in chosen]
    with writing(path), path.open("wb") as file:
        # Checksums have a fixed length, so the final header can overwrite this one, which has zeros in their place.
        file.write(_header(chosen, sums))
        for number, piece in enumerate(chosen):
            on_host = piece.values.detach().cpu().contiguous()
            data = _bytes_of(on_host)
            sums[number] = block_sums(data)
            file.write(data)
        file.seek(0)
        file.write(_header(chosen, sums))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, which must outlive them.

    `Tensor.numpy` would make the storage one that offloading could no longer shrink.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def _header(pieces: Sequence[Piece], sums: Sequence[str]) -> bytes:
    """Return the bytes before the data of a safetensors file."""
    listed = json.dumps([[piece.name, piece.box.offset, piece.box.size] for piece in pieces])
    header: dict[str, object] = {"__metadata__": {"pieces": listed, SUMS: "".join(sums)}}
    end = 0
    for number, piece in enumerate(pieces):
        begin, end = end, end + piece.values.nbytes
        header[str(number)] = {"dtype": _CODES[piece.values.dtype], "shape": piece.box.size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class _Stored:
    """A piece as it is stored in a file."""

    path: Path
    box: Box
    dtype: torch.dtype
    begin: int
    """Position of its first byte in the file."""
    sums: str | None
    """Checksums of its blocks; None in an older file without checksums."""

    def blocks(self, box: Box) -> range:
        """Return the numbers of the blocks between the first and the last element of a box within this piece."""
        first, last = (_place(self.box.size, corner) for corner in self._inside(box).corners)
        return range(first * self.dtype.itemsize // BLOCK, last * self.dtype.itemsize // BLOCK + 1)

    def parts(self, box: Box, blocks: range, memory: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the values of a box within this piece block by block, each block in the same memory.

        Raises DamagedFile if the bytes of a block are not those that were written.
        """
        wanted = self._inside(box)
        width, count = self.dtype.itemsize, math.prod(self.box.size)
        for number in blocks:
            begin, end = number * BLOCK // width, min((number + 1) * BLOCK // width, count)
            inside = [(part, place) for part, place in boxes_of_range(self.box.size, begin, end) if part & wanted]
            if not inside:
                continue
            values = self._read(number, memory[: (end - begin) * width]).view(self.dtype)
            for part, place in inside:
                shared = part & wanted
                assert shared is not None
                data = values[place - begin : place - begin + math.prod(part.size)].view(part.size)
                offset = tuple(a + b for a, b in zip(shared.offset, self.box.offset, strict=True))
                yield Box(offset, shared.size), data[shared.within(part)]

    def _inside(self, box: Box) -> Box:
        """Return the box with its offset from this piece's."""
        return Box(tuple(a - b for a, b in zip(box.offset, self.box.offset, strict=True)), box.size)

    def _read(self, block: int, memory: Tensor) -> Tensor:
        data, place = memory.numpy().data, self.begin + block * BLOCK
        fill(self.path, place, data)
        if self.sums is not None and sum_of(data) != self.sums[block * SUM_LETTERS : (block + 1) * SUM_LETTERS]:
            raise DamagedFile(f"{self.path} has other content than was written, in the {len(data)} bytes from {place} on")
        return memory


def _place(shape: Shape, corner: Shape) -> int:
    """Return the index of an element in the row-major order of a tensor."""
    place = 0
    for length, index in zip(shape, corner, strict=True):
        place = place * length + index
    return place


class PieceReader:
    """Reads the pieces of all files of a directory."""

    def __init__(self, directory: Path) -> None:
        """Index the files; raises DamagedFile if one of them holds no pieces."""
        self._directory = directory
        threads = min(_THREADS, torch.get_num_threads())
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="fivefold-read")
        self._memory = [torch.empty(BLOCK, dtype=torch.uint8) for _ in range(threads)]
        self._stored: dict[str, list[_Stored]] = defaultdict(list)
        for path in sorted(directory.glob("*.safetensors")):
            for name, stored in _pieces_of(path):
                self._stored[name].append(stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Read a box of a tensor into `values`.

        Raises DamagedFile if its bytes are not those that were written, and ValueError if the files do not hold all of it.
        """
        filled = 0
        for stored in self._stored.get(name, ()):
            if shared := box & stored.box:
                self._copy(stored, shared, values, box)
                filled += math.prod(shared.size)
        if filled != math.prod(box.size):
            raise UserError(
                f"{self._directory} holds {filled} of the {math.prod(box.size)} numbers of {name} at {box.offset}: it was "
                "written for another model, or on the other trainer for a family without a file here, or files are missing"
            )

    def _copy(self, stored: _Stored, shared: Box, values: Tensor, box: Box) -> None:
        """Copy a box of a stored piece into `values`, which are those of `box`; in several threads if it is large."""

        def copy(blocks: range, memory: Tensor) -> None:
            for part, data in stored.parts(shared, blocks, memory):
                values[part.within(box)].copy_(data)

        blocks = stored.blocks(shared)
        length = max(_LEAST_BLOCKS, -(-len(blocks) // len(self._memory)))
        if len(blocks) <= length:
            copy(blocks, self._memory[0])
            return
        shares = [blocks[begin : begin + length] for begin in range(0, len(blocks), length)]
        list(self._threads.map(copy, shares, self._memory))


def _pieces_of(path: Path) -> Iterator[tuple[str, _Stored]]:
    """Yield the name and location of each piece of a file."""
    header = read_header(path)
    sums, place = header.metadata.get(SUMS), 0
    try:
        for number, (name, offset, size) in enumerate(json.loads(header.metadata["pieces"])):
            entry = header.entries[str(number)]
            kind, (first, last) = _TYPES[entry["dtype"]], entry["data_offsets"]
            if last - first != math.prod(size) * kind.itemsize or len(offset) != len(size):
                raise ValueError(f"{name} of {size} has {last - first} bytes")
            end = place + count_blocks(last - first) * SUM_LETTERS
            sums_of_piece = None if sums is None else sums[place:end]
            yield name, _Stored(path, Box(tuple(offset), tuple(size)), kind, header.size + first, sums_of_piece)
            place = end
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFile(f"{path} holds no pieces of tensors: {error}") from error
