"""Metrics that are constant by construction: a run's settings leave them no other value. Configuration -> reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fivefold.config.roles import LEARNERS


class Constant(NamedTuple):
    """Metrics that stay the same under some settings, and why."""

    values: Mapping[str, float | None]
    """Metric -> its value; None: any value."""
    settings: Mapping[str, Any]
    """Key -> the value under which they stay the same."""
    reason: str
    rounding: float = 0.0
    """Largest distance from the value that rounding explains."""


CONSTANTS = (
    Constant(
        {"policy/ratio_mean": 1, "policy/clip_fraction": 0, "policy/kl_old": 0, "policy/kl_old_last": 0},
        {"algorithm.updates_per_step": 1, "algorithm.ppo_epochs": 1},
        "each step has one update (algorithm.updates_per_step × ppo_epochs = 1), in which the policy is compared with "
        "itself: the ratio is 1, nothing is clipped, the KL is 0",
        rounding=1e-5,
    ),
    *(
        Constant(
            {f"{model}/lr": None},
            {f"{model}.optimizer.schedule": "constant", f"{model}.optimizer.warmup_steps": 0},
            f"{model}.optimizer.schedule is constant and has no warm-up",
        )
        for model in LEARNERS
    ),
    Constant(
        {"rollout/logprob_diff_mean": 0, "rollout/logprob_diff_max": 0, "rollout/kl": 0},
        {"engine.backend": "transformers", "engine.dtype": None},
        "the engine is transformers, which computes with the trainer's own weights in their dtype: only rounding differs",
        rounding=1e-4,
    ),
    Constant(
        {"async/staleness_mean": 0, "async/staleness_max": 0},
        {"rollout.max_staleness": 0},
        "rollout.max_staleness is 0: every sample is of the latest weights",
    ),
)
"""A metric is folded only if its values show it too."""


def constant_reasons(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return metric -> reason for metrics that the settings keep constant, and that are constant in the rows."""
    return {
        name: row.reason
        for row in CONSTANTS
        if all(_is(config, key, value) for key, value in row.settings.items())
        for name, value in row.values.items()
        if _is_constant(
            [measured for measured_row in rows if (measured := measured_row.get(name)) is not None], value, row.rounding
        )
    }


def _is(config: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether the configuration has this key with this value."""
    setting: Any = config
    for part in key.split("."):
        if not isinstance(setting, Mapping) or part not in setting:
            return False
        setting = setting[part]
    return bool(setting == value)


def _is_constant(values: Sequence[float], value: float | None, rounding: float) -> bool:
    if not values:
        return False
    expected = values[0] if value is None else value
    return all(abs(number - expected) <= max(rounding, 1e-9 * abs(expected)) for number in values)
