"""The experts that vLLM says it has sent tokens to: numpy arrays in its processes, text on their way over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment of releases that say them with this model runner only."""

Packed = tuple[list[int], str]
"""Shape, and the numbers as int16 in base64."""


def as_tensor(found: Any) -> Tensor | None:
    """Of vLLM's array, whose type depends on the number of experts and the release."""
    return None if found is None else torch.from_numpy(np.ascontiguousarray(found).astype(np.int16))


def packed(found: Any) -> Packed | None:
    """The same for JSON."""
    if found is None:
        return None
    numbers = np.ascontiguousarray(found).astype(np.int16)
    return list(numbers.shape), base64.b64encode(numbers.tobytes()).decode()


def unpacked(shape: list[int], numbers: str) -> Tensor:
    """What `packed` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(numbers)), dtype=torch.int16).view(shape)
