"""Peak memory of this rank, on its GPU if it has one: torch's count minus what an engine released outside of torch.

vLLM's sleep mode returns memory to the driver, but torch continues to count it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch


class PeakMemory:
    """Peak of the counted bytes minus the bytes that were released at that time."""

    def __init__(self, counted: Callable[[], int]) -> None:
        """`counted` returns the peak bytes since its last call."""
        self._counted, self._away, self._peak = counted, 0, 0

    def away(self, size: int) -> None:
        """Set how many of the counted bytes are not on the device from now on."""
        self._peak = max(self._peak, self._counted() - self._away)
        self._away = size

    def take(self) -> int:
        """Return the peak bytes since the last call."""
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
    # proc(5): 5 resets the peak to the current value.
    Path("/proc/self/clear_refs").write_text("5")
    return peak


peak_memory = PeakMemory(_of_this_rank)
"""Peak memory of this process."""
