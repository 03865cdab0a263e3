"""Sentences for engines of other systems that are replaced by vLLM."""

from __future__ import annotations

from fivefold_dialects.source import Source

_NAMES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}


def say_replaced(source: Source, key: str, name: str | None) -> None:
    """Add a line where the engine that `key` names is another one than vLLM."""
    if name in _NAMES:
        reason = f"{_NAMES[name]}: vLLM samples instead, from the same distribution, with kernels of its own"
        source.lacks(key, reason, changes_result=False)
