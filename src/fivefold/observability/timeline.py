"""trace/stages.jsonl -> an SVG timeline of the last steps: the trainer's stages and the engine's requests in flight."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from fivefold.config.roles import LEARNERS

WIDTH, LEFT, LANE, LOAD, GAP = 1440, 92, 26, 60, 8
MOST_STEPS = 12
WAITS = "rollout"
"""Stage in which the trainer waits for the engine."""


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


def timeline(rows: Sequence[dict[str, Any]]) -> str:
    """Return SVG and legend for the first rank's stages and its requests; empty if nothing was recorded."""
    rows = _last_steps(rows)
    spans = [span for row in rows for span in row["spans"]]
    if not spans:
        return ""
    begin: float = min(span["start"] for span in spans)
    end: float = max(span["start"] + span["seconds"] for span in spans)
    # A stage too short to be visible needs no color.
    spans = [span for span in spans if span["name"] == "step" or span["seconds"] > (end - begin) / WIDTH]
    stages = sorted({span["name"] for span in spans if span["name"] != "step"})

    def x(moment: float) -> float:
        return LEFT + (min(max(moment, begin), end) - begin) / max(end - begin, 1e-9) * (WIDTH - LEFT - 10)

    parts = [_label("trainer", LANE / 2)]
    for span in spans:
        left, right = x(span["start"]), x(span["start"] + span["seconds"])
        if span["name"] == "step":
            parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="0" y2="{LANE + GAP + LOAD}"/>')
        else:
            title = f"{html.escape(span['name'])} {span['seconds']:.3g} s"
            parts.append(
                f'<rect x="{left:.1f}" y="2" width="{max(right - left, 0.5):.1f}" height="{LANE - 4}" '
                f'fill="{stage_color(span["name"])}"><title>{title}</title></rect>'
            )
    curve = [point for row in rows for point in row.get("curves", {}).get("requests in flight", [])]
    height = LANE
    if curve:
        height = LANE + GAP + LOAD
        parts.append(_label("in flight", LANE + GAP + LOAD / 2))
        parts.append(_area([(x(moment), count) for moment, count in curve], x(end), height))
    ticks = [begin + (end - begin) * share / 6 for share in range(7)]
    for tick in ticks:
        anchor = "end" if tick == ticks[-1] else "middle"
        parts.append(f'<text x="{x(tick):.1f}" y="{height + 16}" text-anchor="{anchor}">{tick - begin:.3g} s</text>')
    legend = "".join(
        f'<span><i class="key" style="border-color:{stage_color(name)};border-top-width:8px"></i> '
        f"{html.escape(name)}{' (waits for the engine)' * (name == WAITS)}</span>"
        for name in stages
    )
    steps = f"steps {rows[0]['step']} to {rows[-1]['step']}" if len(rows) > 1 else f"step {rows[0]['step']}"
    most = f"; in flight at most {max(count for _, count in curve):.0f} requests of the first rank" if curve else ""
    return (
        f"<figure><figcaption>Stages of {steps}{most}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height + 24}" role="img" aria-label="timeline">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def _last_steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last rows since the run was last resumed; its clock restarted then."""
    kept: list[dict[str, Any]] = []
    for row in reversed([row for row in rows if row.get("spans")]):
        first = min(span["start"] for span in row["spans"])
        if kept and first > min(span["start"] for span in kept[-1]["spans"]):
            break
        kept.append(row)
        if len(kept) == MOST_STEPS:
            break
    return kept[::-1]


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{text}</text>'


def _area(points: Sequence[tuple[float, float]], end: float, bottom: float) -> str:
    """Return the area of requests in flight over time."""
    most = max(count for _, count in points) or 1
    corners = [f"{points[0][0]:.1f},{bottom}"]
    for (left, count), right in zip(points, [*(moment for moment, _ in points[1:]), end], strict=True):
        y = bottom - count / most * LOAD
        corners += [f"{left:.1f},{y:.1f}", f"{right:.1f},{y:.1f}"]
    corners.append(f"{end:.1f},{bottom}")
    return f'<polygon points="{" ".join(corners)}" fill="#93c5fd"/>'
