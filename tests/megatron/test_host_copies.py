"""Copies of a share on the host are the share, however its pieces lie in the blocks by which they come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.megatron.dist_checkpoint import HostCopies, Share
from fivefold.megatron.sharded_files import Box, Piece

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def share_of(counts: list[tuple[int, torch.dtype]], device: str, seed: int) -> Share:
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for number, (count, dtype) in enumerate(counts):
        values = torch.randint(-1000, 1000, (count,), generator=generator).to(dtype).to(device)
        pieces.append(Piece(f"tensor-{number}", Box((0,), (count,)), values))
    return Share(0, pieces, None)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), max_size=12),
    block=st.integers(1, 700),
)
def test_copies_are_the_share_whatever_its_pieces_and_the_blocks(device, counts, block):
    copies = HostCopies(torch.device(device), block)
    # The second lies where the first lay.
    for seed in (0, 1):
        share = share_of(counts, device, seed)
        expected = [piece.values.cpu().clone() for piece in share.pieces]
        copied = copies.of(share)
        for piece in share.pieces:
            piece.values.zero_()
        assert [piece.name for piece in copied.pieces] == [piece.name for piece in share.pieces]
        for piece, values in zip(copied.pieces, expected, strict=True):
            assert piece.values.device.type == "cpu"
            torch.testing.assert_close(piece.values, values, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_share_of_another_size_is_copied_whole(device):
    copies = HostCopies(torch.device(device), 64)
    for counts in ([(40, torch.float32)], [(9, torch.bfloat16), (100, torch.float32)], [(3, torch.int64)]):
        share = share_of(counts, device, 2)
        copied = copies.of(share)
        for piece, original in zip(copied.pieces, share.pieces, strict=True):
            torch.testing.assert_close(piece.values, original.values.cpu(), rtol=0, atol=0)
