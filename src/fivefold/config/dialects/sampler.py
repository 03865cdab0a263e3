"""What is said where a system's engine is replaced by another one here."""

from __future__ import annotations

from fivefold.config.dialects.source import Source

SGLANG = "SGLang: vLLM samples instead, from the same distribution, with kernels of its own"


def say_replaced(source: Source, key: str, name: str | None) -> None:
    """Add a line where the engine that `key` names is SGLang."""
    if name == "sglang":
        source.lacks(key, SGLANG, changes_result=False)
