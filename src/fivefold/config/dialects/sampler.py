"""What is said where a system's engine is replaced by another one here."""

from __future__ import annotations

from fivefold.config.dialects.source import Source

INSTEAD = "vLLM samples instead, from the same distribution, with kernels of its own"
SGLANG = f"SGLang: {INSTEAD}"
_NAMES = {"sglang": SGLANG, "trtllm": f"TensorRT-LLM: {INSTEAD}"}


def say_replaced(source: Source, key: str, name: str | None) -> None:
    """Add a line where the engine that `key` names is another one than vLLM."""
    if name in _NAMES:
        source.lacks(key, _NAMES[name], changes_result=False)
