"""Environments of a class in a user's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .common import Refusal, load_code


def load(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Return the class `path/to/file.py:Class`."""
    loaded = load_code(name)
    for method in ("reset", "step"):
        if not callable(getattr(loaded, method, None)):
            raise Refusal(f"environment.class: {name} must have a method {method}")
    if callable(getattr(loaded, "state", None)) != callable(getattr(loaded, "restore", None)):
        raise Refusal(f"environment.class: {name} must have both methods state and restore, or neither")
    return loaded  # type: ignore[no-any-return]
