"""Numbers as text in JSON: written one by one, they take longer than a small model takes to sample them."""

from __future__ import annotations

import base64
from array import array
from typing import Any, Literal


def as_text(numbers: array[Any]) -> str:
    """Returns the bytes of these numbers in base64."""
    return base64.b64encode(numbers).decode()


def from_text(text: str, kind: Literal["i", "f"]) -> list[Any]:
    """Restores the numbers that were given to `as_text`: int32 or float32."""
    numbers = array(kind)
    numbers.frombytes(base64.b64decode(text))
    return numbers.tolist()
