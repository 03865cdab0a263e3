"""Plots of a run's metrics: an SVG file, or characters for a terminal."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.files import read_json_lines
from fivefold.observability.growing import numbers

COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "14 5", "9 3 2 3 2 3", "4 3")
"""Patterns of lines; with the colors, no two of 56 lines look the same."""
_DOTS = ((1, 8), (2, 16), (4, 32), (64, 128))
"""Bits of a Braille character's dots, by line and column."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 220, 58, 26, 12
_KEY = 218
"""Width of a label above the chart."""
CURVE_STYLE = """
text{font:11px system-ui,sans-serif;fill:#6b7280} .title{font-size:14px;font-weight:600;fill:#1f2937}
.page{fill:#ffffff;stroke:#d1d5db} .grid{stroke:#e5e7eb}
@media (prefers-color-scheme:dark){.page{fill:#0d1117;stroke:#30363d} .grid{stroke:#21262d}
text{fill:#9ca3af} .title{fill:#e5e7eb}}
"""


def load_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the metrics of a running or ended run: a dictionary of numbers per step, which docs/metrics.md explains.

    Raises UserError if the directory has no metrics.

    Example: `pandas.DataFrame(load_metrics("runs/first")).set_index("step")["reward/mean"].plot()`.
    """
    path = Path(run_dir) / "metrics.jsonl"
    rows = _read_rows(path)
    if not rows:
        raise UserError(f"no metrics in {path}: is it the directory of a run that has taken a step?")
    return sorted(rows, key=lambda row: row["step"])


def plot(run_dir: Path, metric: str, width: int = 60, height: int = 10) -> str:
    """Return a curve as text."""
    rows = load_metrics(run_dir)
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    if not points:
        names = ", ".join(sorted({name for row in rows for name in row}))
        raise UserError(f"no metric {metric!r} in {run_dir}; there are {names}")
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    grid = [[mark for mark, _ in row] for row in braille([points], width, height)]
    labels = [f"{high:10.3g} ┤", *[" " * 11 + "│"] * (height - 2), f"{low:10.3g} ┤"]
    body = "\n".join(label + "".join(line) for label, line in zip(labels, grid, strict=True))
    return f"{metric}\n{body}\n{' ' * 11}└{'─' * width}\n{' ' * 12}step {first}{' ' * (width - 12)}{last:>6}"


def braille(series: Sequence[Sequence[tuple[int, float]]], width: int, height: int) -> list[list[tuple[str, int]]]:
    """Return curves as characters of 2 x 4 dots: lines of (character, index of the series on top, or -1)."""
    steps = [step for points in series for step, _ in points]
    values = [value for points in series for _, value in points]
    first, low = min(steps), min(values)
    length, size = max(1, max(steps) - first), max(values) - low
    marks = [[0] * width for _ in range(height)]
    owners = [[-1] * width for _ in range(height)]
    for owner, points in enumerate(series):
        before: tuple[int, int] | None = None
        for step, value in points:
            x = round((step - first) / length * (2 * width - 1))
            # Draw a flat curve in the middle.
            y = round((1 - (value - low) / size if size else 0.5) * (4 * height - 1))
            from_x, from_y = before or (x, y)
            dots = max(1, abs(x - from_x), abs(y - from_y))
            for dot in range(dots + 1):
                column, line = (round(a + (b - a) * dot / dots) for a, b in ((from_x, x), (from_y, y)))
                marks[line // 4][column // 2] |= _DOTS[line % 4][column % 2]
                owners[line // 4][column // 2] = owner
            before = (x, y)
    return [
        [(chr(0x2800 + mark) if mark else " ", owner) for mark, owner in zip(*row, strict=True)]
        for row in zip(marks, owners, strict=True)
    ]


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that a run may still be writing."""
    if not path.is_file():
        return []
    rows = []
    for number, row in read_json_lines(path, growing=True):
        if type(row.get("step")) is not int:
            raise UserError(f"{path}, line {number} must have the number of a step: got {row.get('step')!r}")
        rows.append(numbers(row))
    return rows


@dataclass(frozen=True)
class Figure:
    """A chart as SVG text, readable on light and dark pages; a notebook shows it as a picture."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


def figure(run_dir: str | Path, *metrics: str, title: str = "") -> Figure:
    """Return one chart of a run's metrics, which may be patterns as `val/*`.

    Raises UserError if the run has no such metric, or none is named.

    Example: `figure("runs/first", "reward/mean", "val/*/mean@4")` at the end of a notebook's cell.
    """
    rows = load_metrics(run_dir)
    names = sorted({name for row in rows for name in row})
    series = _series(_matching(metrics, names), rows)
    if not series:
        problem = f"no metric {' or '.join(metrics)} in {run_dir}" if metrics else "name a metric, or a pattern as 'val/*'"
        raise UserError(f"{problem}; there are {', '.join(names)}")
    return drawn(series, title)


def drawn(series: Series, title: str) -> Figure:
    """Return one chart of named curves, with two labels per line above it."""
    top = 32 + 16 * ((len(series) + 1) // 2)
    labels = [
        f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" {_style(place)}/>'
        f'<text x="{x + 29}" y="{y + 4}">{html.escape(name)} {_number(points[-1][1])}</text>'
        for place, (name, points) in enumerate(series)
        for x, y in [(LEFT + place % 2 * _KEY, 40 + 16 * (place // 2))]
    ]
    return Figure(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + top}" width="{WIDTH * 1.4:.0f}" role="img" '
        f'aria-label="{html.escape(title)}"><style>{CURVE_STYLE}</style>'
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT + top - 1}" rx="8"/>'
        f'<text class="title" x="{LEFT}" y="26">{html.escape(title)}</text>{"".join(labels)}'
        f'<g transform="translate(0 {top})">{_curves(series)}</g></svg>\n'
    )


Series = list[tuple[str, list[tuple[int, float]]]]
"""Name of each metric and its (step, value) pairs, without steps that lack a value."""


def _series(names: Sequence[str], rows: list[dict[str, Any]]) -> Series:
    series = [(name, [(row["step"], row[name]) for row in rows if row.get(name) is not None]) for name in names]
    return [(name, points) for name, points in series if points]


def _style(place: int) -> str:
    """Return color and pattern of a chart's line, as attributes."""
    dash = _DASHES[place % len(_DASHES)]
    return f'stroke="{COLORS[place % len(COLORS)]}" stroke-width="1.6"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _curves(series: Series) -> str:
    """Return grid, axes and lines of a chart of WIDTH x HEIGHT."""
    values = [value for _, points in series for _, value in points]
    steps = [step for _, points in series for step, _ in points]
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 10)
        return x, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in _ticks(low, high):
        _, y = place(first, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in _ticks(first, last):
        if tick == int(tick):
            x, _ = place(tick, low)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{int(tick)}</text>')
    parts.append(f'<text x="{LEFT - 10}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
    for number, (_, points) in enumerate(series):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLORS[number % len(COLORS)]}"/>')
        parts.append(f'<polyline points="{path}" fill="none" {_style(number)}/>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from low to high."""
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    spacing = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    start = math.ceil(low / spacing)
    return [tick * spacing for tick in range(start, math.floor(high / spacing + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}"


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    return [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
