"""What is copied to the host is what was on the device, and can be copied again into the same memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.backend import offload
from fivefold.backend.host_memory import HostMemory, size_of
from fivefold.backend.offload import HostCopy
from fivefold.backend.sharded_files import Box, Piece
from fivefold.backend.shares import HostCopies, Share

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
COUNTS = st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), max_size=12)


def tensors_of(counts: list[tuple[int, torch.dtype]], device: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1000, 1000, (count,), generator=generator).to(dtype).to(device) for count, dtype in counts]


def same(copies: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(copies) == len(expected)
    for one, other in zip(copies, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=100)
@given(several=st.lists(COUNTS, min_size=1, max_size=3))
def test_copies_of_a_share_are_the_share_and_stay_so(device, several):
    """The later ones lie where the first lay, or in other memory where their size is another."""
    copies = HostCopies(torch.device(device))
    for seed, counts in enumerate([several[0], *several]):
        tensors = tensors_of(counts, device, seed)
        expected = [tensor.cpu().clone() for tensor in tensors]
        pieces = [Piece(f"tensor-{i}", Box((0,), tuple(tensor.shape)), tensor) for i, tensor in enumerate(tensors)]
        if seed == 1:
            copies.prepare(Share(0, pieces, None))
        copied = copies.of(Share(0, pieces, None)).pieces
        for tensor in tensors:
            tensor.zero_()
        assert [piece.name for piece in copied] == [piece.name for piece in pieces]
        assert all(piece.values.device.type == "cpu" for piece in copied)
        same([piece.values for piece in copied], expected)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=50)
@given(several=st.lists(COUNTS, min_size=1, max_size=3))
def test_what_left_the_device_comes_back_bit_for_bit(device, several):
    part = HostCopy(torch.device(device), bucket_mb=1)
    part._piece = 64
    for seed, counts in enumerate([several[0], *several]):
        tensors = tensors_of(counts, device, seed)
        expected = [tensor.cpu().clone() for tensor in tensors]
        assert part.offload(tensors) == sum(tensor.nbytes for tensor in tensors)
        assert all(not tensor.untyped_storage().nbytes() for tensor in tensors)
        part.onload()
        same(tensors, expected)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=50)
@given(first=COUNTS, later=COUNTS)
def test_memory_that_is_prepared_while_tensors_are_away_holds_them_and_later_ones(device, first, later):
    """The first ones come back from where they lie; no memory is added when all of them leave."""
    part = HostCopy(torch.device(device), bucket_mb=1)
    tensors, more = tensors_of(first, device, 0), tensors_of(later, device, 1)
    expected = [tensor.cpu().clone() for tensor in [*tensors, *more]]
    wanted = size_of(expected)
    part.offload(tensors)
    part.prepare([], [tensor.to("meta") for tensor in more])
    prepared = part.capacity
    assert prepared == wanted
    part.onload()
    same(tensors, expected[: len(tensors)])
    part.prepare(tensors, [tensor.to("meta") for tensor in more])
    for _ in range(2):
        part.offload([*tensors, *more])
        assert part.capacity == prepared
        part.onload()
        same([*tensors, *more], expected)


def test_memory_is_prepared_in_a_thread_that_is_waited_for_where_it_is_needed(monkeypatch):
    begin, threads = threading.Event(), []

    def allocate(size, device):
        begin.wait(10)
        threads.append(threading.current_thread())
        return HostMemory(size, device)

    monkeypatch.setattr(offload, "HostMemory", allocate)
    part, tensor = HostCopy(torch.device("cpu"), bucket_mb=1), torch.arange(10)
    part.prepare([tensor], [torch.empty(10, device="meta")])
    assert part.capacity == 80 + 48 and not threads, "the caller continues meanwhile"
    begin.set()
    part.offload([tensor])
    assert threads and threads[0] is not threading.main_thread()
    part.onload()
    assert tensor.tolist() == list(range(10))


@pytest.mark.gpu
def test_memory_that_is_prepared_is_pinned_and_of_the_right_device():
    part = HostCopy(torch.device("cuda"), bucket_mb=1)
    tensor = torch.arange(1 << 20, device="cuda")
    part.prepare([tensor], [torch.empty(1 << 20, device="meta")])
    assert all(memory.result().bytes_B.is_pinned() for _, memory in part._memory)
    part.offload([tensor])
    part.onload()
    assert torch.equal(tensor.cpu(), torch.arange(1 << 20))


@pytest.mark.gpu
def test_memory_is_pinned_and_given_back_so_that_it_can_be_pinned_again():
    for _ in range(50):
        memory = HostMemory(1 << 22, torch.device("cuda"))
        assert memory.bytes_B.is_pinned()
        del memory
        gc.collect()


def test_places_lie_side_by_side_where_their_types_want_them():
    tensors = tensors_of([(3, torch.bfloat16), (5, torch.int64), (0, torch.float32), (1, torch.float32)], "cpu", 0)
    memory = HostMemory(size_of(tensors), torch.device("cpu"))
    places = memory.places(tensors)
    begins = [place.storage_offset() * place.element_size() for place in places]
    assert begins == [0, 16, 64, 64] and size_of(tensors) == 80
    assert [(place.dtype, place.shape) for place in places] == [(tensor.dtype, tensor.shape) for tensor in tensors]
