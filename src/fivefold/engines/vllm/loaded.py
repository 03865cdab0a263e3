"""Checks that vLLM can be loaded: its version does not show whether its compiled parts fit torch and the driver."""

from __future__ import annotations


def load() -> str:
    """Returns the name of a vLLM module; raises what importing it raises."""
    from vllm import LLM

    return str(LLM.__module__)
