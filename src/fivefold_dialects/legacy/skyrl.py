"""Read SkyRL's keys and defaults of the package skyrl-train (2025 to 2026-03); skyrl.yaml has its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_dialects.source import Source
from fivefold_dialects.table import load, several

_ENGINE = "generator.inference_engine."
_OLDER = {name: f"inference_engine_{name}" for name in several("(tensor expert data pipeline)_parallel_size")}
_OLDER["num_engines"] = "num_inference_engines"
"""Engine settings that had other names in skyrl-train -> those names; there all were in the section generator."""
_OLDER_KEYS = frozenset(several(load("legacy/skyrl")["older"]))
TOKEN_MEAN = "skyrl.token_mean"
"""Internal key: the mean that `token_mean` stands for in a release. It is not a key of SkyRL, so no run can set it."""


def is_before_2026_04(source: Source) -> bool:
    """Return whether losses are averaged over micro-batches, as SkyRL did until #1296 (2026-03-31)."""
    return bool(source.defaults[TOKEN_MEAN] == "micro-batch-token-mean")


def release_of(settings: Mapping[str, Any]) -> str:
    """Return "2026-03" for settings of the package skyrl-train, which ended on 2026-03-02, otherwise "".

    They show by the program's name, or by keys that no later release has.
    """
    is_older = str(settings.get("-m", "")).startswith("skyrl_train.") or not _OLDER_KEYS.isdisjoint(settings)
    return "2026-03" if is_older else ""


def of_engine(source: Source, name: str) -> str:
    """Return the key of an engine's setting: today's key, or that of skyrl-train if only that one is set."""
    older = f"generator.{_OLDER.get(name, name)}"
    return older if source.has(older) and not source.has(_ENGINE + name) else _ENGINE + name


def megatron(source: Source) -> str:
    """Return the policy's section of Megatron-Core from 2025-08 to 2025-10, next to `trainer`; "" if it is not set."""
    return "megatron_config.policy." if source.keys("megatron_config.policy.") else ""


def correction(algorithm: Source) -> tuple[Source, str] | None:
    """Return the section of January 2026 for off_policy_correction, and its word for bounds; None if it is not set."""
    return (algorithm.under("rollout_correction."), "cap") if algorithm.keys("rollout_correction.") else None
