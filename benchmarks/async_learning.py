"""Does learning suffer from samples of older weights? The demo's task at several ages, with and without a correction.

python benchmarks/async_learning.py DIRECTORY        # no GPU; a directory in which `make demo` was run; a quarter of an hour

The engine samples in the ranks, so that every sample is exactly as old as it may be. The picture is written to docs/.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from pathlib import Path

from fivefold.observability.curve import COLORS

HERE = Path(__file__).resolve().parent.parent
AGES, STEPS = (0, 1, 4, 16), 120
CORRECTIONS = {
    "none": [],
    "tis": ["algorithm.rollout_correction.name=tis"],
    "engine's": ["algorithm.rollout_correction.old_logprobs_from=engine"],
}
"""Nothing, truncated weights, or the surrogate's ratio taken to the policy that sampled."""
METRIC = "val/arithmetic/mean@4"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 320, 56, 60, 30


def run(directory: Path, age: int, correction: str) -> list[tuple[int, float]]:
    """Step and accuracy of each evaluation."""
    name = f"ahead-{age}-{correction}"
    rows = directory / "demo/runs" / name / "metrics.jsonl"
    if not rows.is_file() or json.loads(rows.read_text().splitlines()[-1])["step"] < STEPS:
        given = [
            f"trainer.run_dir=demo/runs/{name}", f"rollout.max_staleness={age}", f"trainer.steps={STEPS}",
            "trainer.stop_at={}", "policy.backend=megatron:d1", "trainer.loggers=[]", *CORRECTIONS[correction],
        ]  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "fivefold.cli", "train", str(HERE / "examples/demo/grpo.yaml"), *given],
            cwd=directory, check=True, env={**os.environ, "PYTHONPATH": str(HERE / "src")},
        )  # fmt: skip
    metric_rows = [json.loads(line) for line in rows.read_text().splitlines()]
    return [(row["step"], row[METRIC]) for row in metric_rows if METRIC in row]


def picture(curves: dict[tuple[int, str], list[tuple[int, float]]]) -> str:
    """Accuracy over steps; a step has the same number of samples in every run."""

    def place(step: float, value: float) -> str:
        x = LEFT + step / STEPS * (WIDTH - LEFT - 12)
        return f"{x:.1f},{TOP + (1 - value) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(0, tick).split(",")
        parts.append(f'<line x1="{x}" x2="{WIDTH - 12}" y1="{y}" y2="{y}" stroke="#9ca3af" stroke-opacity=".3"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.0f}" text-anchor="end">{tick:g}</text>')
    for step in range(0, STEPS + 1, 20):
        x = place(step, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{step}</text>')
    for (age, correction), points in curves.items():
        row, column = list(CORRECTIONS).index(correction), AGES.index(age)
        color, dashes = COLORS[column], f' stroke-dasharray="{("", "5 3", "2 3")[row]}"' if row else ""
        line = " ".join(place(*point) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        left, top = LEFT + column * 145, 20 + 14 * row
        label = html.escape(f"k = {age}, {correction} {points[-1][1]:.2f}")
        parts.append(f'<text x="{left}" y="{top}" style="fill:{color}">{label}</text>')
        if dashes:
            parts.append(f'<line x1="{left - 16}" x2="{left - 3}" y1="{top - 4}" y2="{top - 4}" stroke="{color}"{dashes}/>')
    style = "text{font:11px system-ui,sans-serif;fill:#6b7280}.page{fill:#fff;stroke:#d1d5db}"
    dark = "@media (prefers-color-scheme:dark){.page{fill:#0d1117;stroke:#30363d}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="accuracy at several ages of samples"><style>{style}{dark}</style>'
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    directory = Path(sys.argv[1])
    curves = {}
    for age in AGES:
        for correction in CORRECTIONS if age else ["none"]:
            points = run(directory, age, correction)
            curves[age, correction] = points
            print(f"k = {age:2}, {correction:8}", *(f"{step}: {value:.3f}" for step, value in points), flush=True)
    (HERE / "docs/async-learning.svg").write_text(picture(curves))


if __name__ == "__main__":
    main()
