"""Most memory that this rank has held, of its GPU if it has one: torch's count, less what an engine gave back behind it.

vLLM's sleep returns memory to the driver that torch goes on counting as its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch


class PeakMemory:
    """The largest of what was counted less what was away at the time."""

    def __init__(self, counted: Callable[[], int]) -> None:
        """`counted` gives the most bytes since it was last asked."""
        self._counted, self._away, self._peak = counted, 0, 0

    def away(self, size: int) -> None:
        """From now on so many of the bytes that are counted are not on the device."""
        self._peak = max(self._peak, self._counted() - self._away)
        self._away = size

    def take(self) -> int:
        """Bytes since this was last asked."""
        self.away(self._away)
        peak, self._peak = self._peak, 0
        return peak


def _of_this_rank() -> int:
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    # proc(5): 5 sets the peak to what is held now.
    Path("/proc/self/clear_refs").write_text("5")
    return peak


peak_memory = PeakMemory(_of_this_rank)
"""Of this process."""
