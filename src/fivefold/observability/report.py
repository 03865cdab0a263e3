"""A run directory -> one self-contained HTML page, and a curve for the terminal. Needs no network and none of our code."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.files import read_json_lines, read_text
from fivefold.observability.metrics import find
from fivefold.observability.timeline import timeline

COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 220, 58, 26, 12
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean", "reward/std")),
    ("Validation accuracy", ("val/*/accuracy", "val/*/mean@*", "val/*/pass@*")),
    ("Groups", ("reward/pass@*", "reward/mean@*", "reward/solve_all", "reward/solve_none")),
    ("Validation loss", ("val/loss",)),
    ("Validation pairs", ("val/accuracy", "val/margin")),
    ("Loss", ("policy/loss",)),
    ("Gradient norm", ("policy/grad_norm",)),
    ("Entropy", ("policy/entropy",)),
    ("KL to the reference", ("policy/kl_reference",)),
    ("Ratio and clipping", ("policy/ratio_mean", "policy/clip_fraction")),
    ("KL from the policy before the step", ("policy/kl_old", "policy/kl_old_last")),
    (
        "Correction of the rollout",
        ("rollout_correction/weight_mean", "rollout_correction/masked_fraction", "rollout_correction/effective_sample_size"),
    ),
    ("Critic: explained variance", ("critic/explained_variance",)),
    ("Critic: loss", ("critic/loss",)),
    ("Dynamic sampling: prompts with reward variance", ("dynamic_sampling/kept_fraction",)),
    ("Engine against trainer: log-prob difference", ("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/kl")),
    ("Response length", ("response/length_mean", "response/length_max")),
    ("Truncated and repetitive responses", ("response/truncated_fraction", "response/repetition")),
    ("Sampling ahead: age of samples in steps", ("async/staleness_mean", "async/staleness_max")),
    ("Sampling ahead: groups not used yet", ("async/unused_groups", "async/complete_groups")),
    ("Sampling ahead: who waits, seconds", ("async/trainer_wait_seconds", "async/engine_wait_seconds")),
    ("Learning rate", ("policy/lr", "critic/lr")),
    ("Tokens a second", ("throughput/tokens_per_second", "throughput/train_tokens_per_second")),
    ("Peak memory, GB", ("memory/peak_gb",)),
)
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1480px;padding:0 1rem;color:#1f2937;background:#fff}
h1{font-size:1.4rem;margin:0} h2{font-size:1.1rem;margin:2rem 0 .6rem} .meta{color:#6b7280;margin:.2rem 0 1rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(460px,1fr));gap:1rem}
figure{margin:0;border:1px solid #e5e7eb;border-radius:8px;padding:.6rem} figcaption{font-weight:600;margin-bottom:.2rem}
svg{width:100%;height:auto;display:block} svg text{font:11px system-ui,sans-serif;fill:#6b7280} .grid{stroke:#f3f4f6}
.legend{font-size:12px;color:#4b5563} .legend b{font-weight:600}
table{border-collapse:collapse;font-size:14px} td,th{padding:.25rem .7rem}
td,th{border-bottom:1px solid #e5e7eb;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;margin:0;font:13px/1.4 ui-monospace,monospace}
.good{color:#047857} .bad{color:#b91c1c} details{margin:.3rem 0} summary{cursor:pointer}
"""
CURVE_STYLE = """
text{font:11px system-ui,sans-serif;fill:#6b7280} .title{font-size:14px;font-weight:600;fill:#1f2937}
.page{fill:#ffffff;stroke:#d1d5db} .grid{stroke:#e5e7eb}
@media (prefers-color-scheme:dark){.page{fill:#0d1117;stroke:#30363d} .grid{stroke:#21262d}
text{fill:#9ca3af} .title{fill:#e5e7eb}}
"""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html; raises ValueError when the directory holds no metrics."""
    rows = read_metrics(run_dir)
    samples = _read_rows(run_dir / "samples.jsonl")
    config = read_text(run_dir / "run.yaml") if (run_dir / "run.yaml").is_file() else ""
    names = sorted({name for row in rows for name in row})
    charts = "".join(_chart(title, _matching(patterns, names), rows) for title, patterns in CHARTS)
    steps = max((int(row["step"]) for row in rows), default=0)
    page = f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>{html.escape(run_dir.name)} - Fivefold</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>
<h1>{html.escape(str(run_dir))}</h1><p class="meta">{steps} steps, {_duration(rows)}</p>
{_summary(rows)}<h2>Curves</h2><div class="charts">{charts}</div>
<h2>Where the time goes</h2>{timeline(_read_rows(run_dir / "trace" / "stages.jsonl"), COLORS)}{_times(rows)}
<h2>Samples</h2>{_samples(samples)}
<h2>Configuration</h2><details><summary>run.yaml</summary><pre>{html.escape(config)}</pre></details></body></html>"""
    out = run_dir / "report.html"
    out.write_text(page)
    return out


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in order of steps."""
    rows = _read_rows(run_dir / "metrics.jsonl")
    if not rows:
        raise ValueError(f"no metrics in {run_dir / 'metrics.jsonl'}: is it the directory of a run that has taken a step?")
    return sorted(rows, key=lambda row: row["step"])


def plot(run_dir: Path, metric: str, width: int = 60, height: int = 10) -> str:
    """A curve in characters."""
    rows = read_metrics(run_dir)
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    if not points:
        names = ", ".join(sorted({name for row in rows for name in row}))
        raise ValueError(f"no metric {metric!r} in {run_dir}; there are {names}")
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    grid = [[" "] * width for _ in range(height)]
    for step, value in points:
        column = round((step - first) / max(1, last - first) * (width - 1))
        line = round((value - low) / (high - low or 1) * (height - 1))
        grid[height - 1 - line][column] = "•"
    labels = [f"{high:10.3g} ┤", *[" " * 11 + "│"] * (height - 2), f"{low:10.3g} ┤"]
    body = "\n".join(label + "".join(line) for label, line in zip(labels, grid, strict=True))
    return f"{metric}\n{body}\n{' ' * 11}└{'─' * width}\n{' ' * 12}step {first}{' ' * (width - 12)}{last:>6}"


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file to which a run may still be writing."""
    if not path.is_file():
        return []
    rows = []
    for number, row in read_json_lines(path, growing=True):
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number} must have the number of a step: got {row.get('step')!r}")
        rows.append(row)
    return rows


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    from fnmatch import fnmatchcase

    return [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]


def _duration(rows: list[dict[str, Any]]) -> str:
    seconds = (rows[-1].get("wall") or 0) - (rows[0].get("wall") or 0)
    return f"{seconds / 60:.1f} minutes from the first to the last record"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _labeled(name: str) -> str:
    """The metric's name, with its meaning where the pointer rests on it."""
    metric = find(name)
    meaning = "" if metric is None else f"{metric.meaning} [{metric.unit}]"
    return f'<span title="{html.escape(meaning)}">{html.escape(name)}</span>'


def _summary(rows: list[dict[str, Any]]) -> str:
    shown = [
        "reward/mean",
        "val/loss",
        "policy/loss",
        "critic/explained_variance",
        "response/length_mean",
        "rollout/logprob_diff_mean",
        "throughput/tokens_per_second",
    ]
    names = sorted({name for row in rows for name in row if name.startswith("val/") and name.endswith("accuracy")}) + shown
    lines = []
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            cells = "".join(
                f'<td class="n">{_number(value)}</td>' for value in (values[0], values[-1], min(values), max(values))
            )
            lines.append(f"<tr><td>{_labeled(name)}</td>{cells}</tr>")
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>least</th><th>most</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _chart(title: str, names: list[str], rows: list[dict[str, Any]]) -> str:
    series = _series(names, rows)
    if not series:
        return ""
    legend = [
        f'<span style="color:{color}">■</span> {_labeled(name)} <b>{_number(points[-1][1])}</b>'
        for (name, points), color in zip(series, _colors(series), strict=True)
    ]
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{_curves(series)}</svg>'
        f'<div class="legend">{" &nbsp; ".join(legend)}</div></figure>'
    )


def write_curve(run_dir: Path, metrics: Sequence[str], title: str, out: Path) -> Path:
    """One chart of a run as an SVG file of its own, readable on light and dark pages."""
    rows = read_metrics(run_dir)
    names = sorted({name for row in rows for name in row})
    series = _series(_matching(metrics, names), rows)
    if not series:
        raise ValueError(f"no metric {' or '.join(metrics)} in {run_dir}; there are {', '.join(names)}")
    labels = [
        f'<text x="{LEFT + place * 200}" y="44" style="fill:{color}">■ {html.escape(name)} {_number(points[-1][1])}</text>'
        for place, ((name, points), color) in enumerate(zip(series, _colors(series), strict=True))
    ]
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 48}" width="{WIDTH * 1.4:.0f}" role="img" '
        f'aria-label="{html.escape(title)}"><style>{CURVE_STYLE}</style>'
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT + 47}" rx="8"/>'
        f'<text class="title" x="{LEFT}" y="26">{html.escape(title)}</text>{"".join(labels)}'
        f'<g transform="translate(0 48)">{_curves(series)}</g></svg>\n'
    )
    return out


Series = list[tuple[str, list[tuple[int, float]]]]
"""Name of a metric and its (step, value), for each that has a value."""


def _series(names: Sequence[str], rows: list[dict[str, Any]]) -> Series:
    found = [(name, [(row["step"], row[name]) for row in rows if row.get(name) is not None]) for name in names]
    return [(name, points) for name, points in found if points]


def _colors(series: Series) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(len(series))]


def _curves(series: Series) -> str:
    """Grid, axes and lines of a chart of WIDTH x HEIGHT."""
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
    for (_, points), color in zip(series, _colors(series), strict=True):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    spacing = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    start = math.ceil(low / spacing)
    return [tick * spacing for tick in range(start, math.floor(high / spacing + 1e-9) + 1)]


def _times(rows: list[dict[str, Any]]) -> str:
    names = sorted({name for row in rows for name in row if name.startswith("time/")})
    totals = {name[5:]: sum(row.get(name) or 0 for row in rows) for name in names}
    whole = totals.get("step", 0) + sum(totals.get(name, 0) for name in ("eval", "save"))
    lines = []
    for name, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        share = seconds / whole if whole else 0
        bar = f'<div style="background:#93c5fd;height:10px;width:{share * 300:.0f}px"></div>'
        lines.append(
            f'<tr><td>{html.escape(name)}</td><td class="n">{seconds:.1f} s</td><td class="n">{share:.0%}</td>'
            f"<td>{bar}</td></tr>"
        )
    return f"<table><tr><th>stage</th><th>total</th><th>share</th><th></th></tr>{''.join(lines)}</table>"


def _samples(samples: list[dict[str, Any]], most: int = 60) -> str:
    """The last samples first: what the model answers now is what one looks for."""
    lines = []
    for row in reversed(samples[-most:]):
        # A reward that failed or was not finite is null.
        reward = row.get("reward")
        kind, shown = ("bad", "–") if reward is None else ("good" if reward > 0 else "bad", _number(reward))
        kind_of_sample, prompt, response, truth = (
            html.escape(str(row.get(name) or "")) for name in ("kind", "prompt", "response", "ground_truth")
        )
        lines.append(
            f"<tr><td>{row['step']}</td><td>{kind_of_sample}</td><td><pre>{prompt}</pre></td><td><pre>{response}</pre></td>"
            f'<td>{truth}</td><td class="n {kind}">{shown}</td><td class="n">{row.get("response_tokens", "")}</td></tr>'
        )
    head = "<tr><th>step</th><th></th><th>prompt</th><th>response</th><th>truth</th><th>reward</th><th>tokens</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"
