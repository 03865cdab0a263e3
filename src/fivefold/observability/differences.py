"""Texts of several run.yaml -> the keys that differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import yaml

_EVERY_RUNS_OWN = ("trainer.run_dir",)


@lru_cache(maxsize=64)
def settings(text: str) -> dict[str, Any]:
    """Parse the text of a run.yaml; anything else than a mapping is empty."""
    try:
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def differences(texts: Sequence[str]) -> list[tuple[str, list[str | None]]]:
    """Return (key, value in each run) of the keys that differ between runs; None where a run does not have the key."""
    runs = [dict(leaf for key, value in settings(text).items() for leaf in _leaves(value, str(key))) for text in texts]
    names = sorted({name for run in runs for name in run} - set(_EVERY_RUNS_OWN))
    return [(name, values) for name in names if len(set(values := [run.get(name) for run in runs])) > 1]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as a text) for every value that is not a mapping with entries."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
