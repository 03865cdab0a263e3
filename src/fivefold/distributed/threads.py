"""Work in a thread next to the run, and PyTorch without threads of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Starts `work` in a separate thread; the future holds what it returns or raises."""
    pool = ThreadPoolExecutor(1, name)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch's operations on the CPU without its other threads.

    For operations on a few thousand numbers, which PyTorch divides over all threads: indexing took 35 us a call with two
    threads, and 6 ms, whatever the size, with 32 on a virtual machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
