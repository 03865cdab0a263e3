"""The experts to which vLLM reports that it sent tokens: numpy arrays in its processes, text over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment for releases that report them with this model runner only."""

Packed = tuple[list[int], str]
"""Shape, and the numbers as int16 in base64."""


def as_tensor(array: Any) -> Tensor | None:
    """Converts vLLM's array, whose dtype depends on the number of experts and the release, to an int16 tensor."""
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array).astype(np.int16))


def packed(array: Any) -> Packed | None:
    """Converts vLLM's array to JSON values."""
    if array is None:
        return None
    numbers = np.ascontiguousarray(array).astype(np.int16)
    return list(numbers.shape), base64.b64encode(numbers.tobytes()).decode()


def unpacked(shape: list[int], numbers: str) -> Tensor:
    """Restores the array that was given to `packed`."""
    return torch.frombuffer(bytearray(base64.b64decode(numbers)), dtype=torch.int16).view(shape)
