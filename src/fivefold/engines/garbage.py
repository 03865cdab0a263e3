"""Keeps the garbage collector of an engine's process away from what lives as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 50_000
"""New objects after which an engine that samples collects garbage. A step makes several for each request, and Python's own
number, 700, is reached many times in a step of many requests."""


def freeze_heap() -> int:
    """Collect garbage, and exempt all objects that are left from later collections; returns how many are not exempt."""
    gc.collect()
    gc.freeze()
    return len(gc.get_objects())


def collect_seldom() -> None:
    """Collect garbage after many new objects only, in a process that samples and does nothing else."""
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Collects garbage after many new objects only while a rank samples."""
    before = gc.get_threshold()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
