"""Recognize ROLL's releases before 2026, and read how they normalized rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_dialects.source import Source


def release_of(settings: Mapping[str, Any]) -> str:
    """Return "2025-08" if the settings have keys of reward normalization that no later release has, otherwise ""."""
    return "2025-08" if not {"reward_norm", "reward_scale", "reward_shift"}.isdisjoint(settings) else ""


def normalization(source: Source, mean: str | None, deviation: str | None) -> tuple[str | None, str | None]:
    """Return the levels of the mean and the deviation that normalize rewards: today's keys, or else those of reward_norm."""
    if (kind := source.text("reward_norm")) not in ("group", "batch"):
        return mean, deviation
    return mean or kind, deviation or (kind if source.flag("reward_scale") else None)
