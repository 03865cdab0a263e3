"""Tensors in pieces: what is written by anyone is read by anyone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fivefold.backend.sharded_files import Box, Piece, PieceReader, boxes_of_range, write_pieces
from fivefold.summed_files import BLOCK, count_blocks, read_header


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_boxes_of_a_range_are_its_numbers_in_their_order(shape, data):
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    whole = torch.arange(count).view(shape)
    boxes = list(boxes_of_range(tuple(shape), begin, end))
    everything = Box(tuple(0 for _ in shape), tuple(shape))
    taken = [whole[box.within(everything)].reshape(-1) for box, _ in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.long), *taken]).tolist() == list(range(begin, end))
    assert [first for _, first in boxes] == [int(part[0]) for part in taken]
    # Part of a row and the rest of it on either side, on every axis but the last.
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.lists(st.integers(0, 60), max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_any_box_is_read_from_whatever_ranges_were_written(tmp_path_factory, shape, cuts, data):
    directory, count = tmp_path_factory.mktemp("pieces"), math.prod(shape)
    values = torch.randn(count).view(shape)
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    for rank, (begin, end) in enumerate(itertools.pairwise(edges)):
        flat = values.reshape(-1)
        pieces = [
            Piece("w", box, flat[first : first + math.prod(box.size)].view(box.size))
            for box, first in boxes_of_range(tuple(shape), begin, end)
        ]
        odd = Piece("other", Box((rank,), (1,)), torch.ones(1, dtype=torch.bfloat16))
        write_pieces(directory / f"rank-{rank}.safetensors", [odd, *pieces])
    offset = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(data.draw(st.integers(1, length - first)) for first, length in zip(offset, shape, strict=True))
    box, read = Box(offset, size), torch.empty(size)
    PieceReader(directory).fill("w", box, read)
    assert torch.equal(read, values[box.within(Box(tuple(0 for _ in shape), tuple(shape)))])


def test_a_large_tensor_is_read_in_threads_and_each_of_its_blocks_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    path, whole = tmp_path / "rank-0.safetensors", Box((0, 0), (600, 9000))
    values = torch.arange(600 * 9000.0).view(whole.size)
    write_pieces(path, [Piece("w", whole, values)])
    box = Box((3, 8), (590, 8990))
    read = torch.empty(box.size)
    PieceReader(tmp_path).fill("w", box, read)
    assert torch.equal(read, values[box.within(whole)])
    begin = read_header(path).size
    with path.open("r+b") as file:
        for block in range(count_blocks(values.nbytes)):
            place = begin + block * BLOCK + 5
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
            file.flush()
            with pytest.raises(
                ValueError, match=rf"other content than was written, in the \d+ bytes from {begin + block * BLOCK} on"
            ):
                PieceReader(tmp_path).fill("w", whole, values.clone())
            file.seek(place)
            file.write(bytes([byte]))


def test_files_are_safetensors(tmp_path):
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(7)}
    pieces = [Piece(name, Box(tuple(0 for _ in value.shape), tuple(value.shape)), value) for name, value in values.items()]
    write_pieces(tmp_path / "rank-0.safetensors", pieces)
    with safe_open(tmp_path / "rank-0.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in sorted(file.keys())]
    assert sorted(map(str, tensors)) == sorted(map(str, values.values()))


def test_a_tensor_that_was_written_can_still_be_offloaded(tmp_path):
    values, several = torch.randn(64), torch.randn(8, 8)
    pieces = [Piece("w", Box((0,), (64,)), values), Piece("t", Box((0, 0), (8, 8)), several.t())]
    write_pieces(tmp_path / "rank-0.safetensors", pieces)
    assert values.untyped_storage().resizable()
    assert several.untyped_storage().resizable()
    read = torch.empty(8, 8)
    PieceReader(tmp_path).fill("t", Box((0, 0), (8, 8)), read)
    assert read.equal(several.t())


def test_what_no_file_holds_is_refused_by_name(tmp_path):
    write_pieces(tmp_path / "rank-0.safetensors", [Piece("w", Box((0, 0), (1, 3)), torch.zeros(1, 3))])
    with pytest.raises(ValueError, match=r"holds 3 of the 6 numbers of w at \(0, 0\): it was written for another model"):
        PieceReader(tmp_path).fill("w", Box((0, 0), (2, 3)), torch.empty(2, 3))
    with pytest.raises(ValueError, match="holds 0 of the 1 numbers of v"):
        PieceReader(tmp_path).fill("v", Box((0,), (1,)), torch.empty(1))


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "rank-0.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0hello")
    with pytest.raises(ValueError, match=r"rank-0\.safetensors is not a safetensors file: its header is not a JSON object"):
        PieceReader(tmp_path)
