"""Triton's kernels on a CPU, by its own interpreter: what vLLM's second model runner needs where there is no back end for CPUs."""

from __future__ import annotations

import importlib.util
import os

is_there = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""It is interpreted where the environment says so before anything of it is imported."""


def interpret() -> None:
    """Let vLLM for CPUs take it, in this process."""
    from triton.backends import backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver = Driver

    backends.clear()
    backends["cpu"] = Backend
