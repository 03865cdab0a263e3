"""The most memory of a step, with an engine that gives memory back after torch's count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fivefold.observability.peak_memory import PeakMemory, peak_memory


def test_the_peak_is_that_since_it_was_last_asked():
    peak_memory.take()
    block = np.ones(1 << 26)
    assert block.nbytes == 1 << 29
    del block
    high, low = peak_memory.take(), peak_memory.take()
    assert high - low > 0.9 * (1 << 29)


def test_what_an_engine_gave_back_does_not_count_while_it_is_away():
    """70 while the engine sampled with its 50; 90 counted while these were away: 40; 75 with 20 of them away: 55."""
    counts = iter([70, 90, 75, 60])
    memory = PeakMemory(lambda: next(counts))
    memory.away(50)
    memory.away(20)
    assert memory.take() == 70
    assert memory.take() == 60 - 20


@pytest.mark.gpu
def test_the_peak_of_a_gpu_is_without_what_is_away():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.cuda.init()
    size = 1 << 28
    pool = torch.empty(size, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_allocated() - size
    peak_memory.take()
    peak_memory.away(size)
    peak_memory.take()
    other = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert peak_memory.take() == held + size
    peak_memory.away(0)
    del pool, other
