"""Whether vLLM can be loaded: its version is no proof, its compiled parts must fit torch and the driver."""

from __future__ import annotations


def load() -> str:
    """Its module; raises what importing it raises."""
    from vllm import LLM

    return str(LLM.__module__)
