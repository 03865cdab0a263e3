"""GPUs by name, for `launch.gpu`: `check` compares a run with these if its GPUs are not in this machine. No torch here.

Figures are from the makers' public data sheets; bfloat16 rates are without sparsity, link rates count both directions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One kind of GPU."""

    memory_gib: float
    """Memory that the driver reports: below the GB of the data sheet, with error correction on."""
    tflops: float
    """Dense bfloat16 rate of matrix products, in TFLOP/s."""
    memory_gb_s: float
    link_gb_s: float
    """Bandwidth of NVLink, or of PCIe without NVLink."""
    capability: float
    """Compute capability."""


FLASH_CAPABILITY = 9.0
"""Minimum compute capability for FlashAttention 4: Hopper's."""


GPUS: dict[str, GPU] = {
    "a10-24g": GPU(22.5, 125, 600, 64, 8.6),
    "a100-40g": GPU(39.5, 312, 1555, 600, 8.0),
    "a100-80g": GPU(79.2, 312, 2039, 600, 8.0),
    "b200-180g": GPU(178.3, 2250, 7700, 1800, 10.0),
    "h100-80g": GPU(79.1, 989, 3350, 900, 9.0),
    "h20-96g": GPU(95.0, 148, 4000, 900, 9.0),
    "h200-141g": GPU(139.8, 989, 4800, 900, 9.0),
    "h800-80g": GPU(79.1, 989, 3350, 400, 9.0),
    "l4-24g": GPU(22.0, 121, 300, 64, 8.9),
    "l40s-48g": GPU(44.4, 362, 864, 64, 8.9),
    "rtx3090-24g": GPU(23.6, 71, 936, 64, 8.6),
    "rtx4090-24g": GPU(23.6, 165, 1008, 64, 8.9),
}
