"""trace/stages.jsonl -> a timeline of the last steps: the trainer's stages and the engine's requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.config.roles import LEARNERS

MOST_STEPS = 12
_SMALLEST = 1 / 1400
"""Share of the time line below which a stage is not visible."""

COLORS = {
    "rollout": "#2563eb",
    "train": "#7c3aed",
    "reward": "#059669",
    "logprobs": "#d97706",
    **dict(zip(LEARNERS[1:], ("#be185d", "#9d174d", "#831843"), strict=False)),
    "pack": "#0891b2",
    "weight_sync": "#dc2626",
    "eval": "#65a30d",
    "save": "#854d0e",
    "verify": "#64748b",
    "load": "#a16207",
}


def stage_color(name: str) -> str:
    """Return the stage's color, the same in every chart."""
    return COLORS.get(name, "#94a3b8")


def timeline(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first rank's stages and its requests in flight, in seconds since the first of them; None without any.

    A stage that is too short to be visible is left out.
    """
    rows = _last_steps(rows)
    spans = [span for row in rows for span in row["spans"]]
    if not spans:
        return None
    begin: float = min(span["start"] for span in spans)
    end: float = max(span["start"] + span["seconds"] for span in spans)
    in_flight = [point for row in rows for point in row.get("curves", {}).get("requests in flight", [])]
    return {
        "steps": [rows[0]["step"], rows[-1]["step"]],
        "seconds": end - begin,
        "stages": [
            [span["name"], round(span["start"] - begin, 4), round(span["seconds"], 4)]
            for span in spans
            if span["name"] == "step" or span["seconds"] > (end - begin) * _SMALLEST
        ],
        "in_flight": [[round(min(max(moment, begin), end) - begin, 4), count] for moment, count in in_flight],
    }


def _last_steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last rows since the run was last resumed; its clock restarted then."""
    latest: list[dict[str, Any]] = []
    for row in reversed([row for row in rows if row.get("spans")]):
        first = min(span["start"] for span in row["spans"])
        if latest and first > min(span["start"] for span in latest[-1]["spans"]):
            break
        latest.append(row)
        if len(latest) == MOST_STEPS:
            break
    return latest[::-1]
