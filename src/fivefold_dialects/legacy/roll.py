"""ROLL before 2026: its releases, and how rewards were normalized then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_dialects.source import Source


def release_of(settings: Mapping[str, Any]) -> str:
    """Return 2025-08 where rewards are normalized by the keys of until then, which no later release has."""
    return "2025-08" if not {"reward_norm", "reward_scale", "reward_shift"}.isdisjoint(settings) else ""


def normalization(source: Source, mean: str | None, deviation: str | None) -> tuple[str | None, str | None]:
    """Return whose mean and deviation rewards are normalized by: those of today's keys, or what reward_norm says."""
    if (kind := source.text("reward_norm")) not in ("group", "batch"):
        return mean, deviation
    return mean or kind, deviation or (kind if source.flag("reward_scale") else None)
