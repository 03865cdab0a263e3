"""Names the part of a step that ran out of memory, by the functions that were active: an error -> a sentence."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fivefold.errors import RunError

_LOWER = "lower policy.tokens_per_micro_batch"
_PARTS = (
    ("log_probs.py", "the logits of one chunk of tokens", _LOWER),
    ("kernels/logits.py", "the logits of one chunk of tokens", _LOWER),
    ("updater.py", "Adam's moments", "raise d, or set policy.fsdp.cpu_adam: true"),
    ("torch/distributed/fsdp", "a gathered layer, or its gradient", "set policy.fsdp.cpu_adam: true, or raise t"),
)
"""End or part of a file's path -> what it allocates, and what to do; the last function that matches counts."""
_ACTIVATIONS = ("activations", f"set policy.recompute: full, raise c, or {_LOWER}")


class OutOfMemoryError(RunError):
    """Raised when a step needs more memory than the device has."""


@contextmanager
def naming_what_is_full(device: torch.device) -> Iterator[None]:
    """Within this block, an allocation that fails becomes an error that names the part and what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        files = [frame.filename for frame in reversed(traceback.extract_tb(error.__traceback__))]
        what, remedy = next(
            ((what, remedy) for file in files for part, what, remedy in _PARTS if part in file), _ACTIVATIONS
        )
        held = ""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            by_rank = torch.cuda.memory_allocated(device)
            held = f" ({by_rank / 2**30:.1f} GiB held by this rank, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"
        raise OutOfMemoryError(
            f"the device ran out of memory for {what}{held}: {remedy}; `fivefold check` has the estimate"
        ) from error
