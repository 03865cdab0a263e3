"""`fivefold watch`: shows runs in the terminal, live or once. No torch here."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fivefold.observability.curve import braille
from fivefold.observability.growing import is_number
from fivefold.observability.run_view import RunView
from fivefold.terminal import raw

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean",)),
    ("accuracy", ("val/*accuracy", "val/*/mean@*", "val/loss")),
    ("KL to the reference", ("policy/kl_reference", "policy/kl_old_last")),
    ("entropy", ("policy/entropy",)),
    ("loss", ("policy/loss",)),
    ("response length", ("response/length_mean",)),
    ("gradient norm", ("policy/grad_norm",)),
    ("engine against trainer", ("rollout/logprob_diff_mean",)),
)
"""Title and candidate metrics of each curve: the first metric that a run has is drawn."""
_COLORS = ("bright_blue", "yellow", "green", "magenta", "cyan", "red")
_MARKS = "■●▲◆★✚"
"""Mark of each run, in its color."""
_STATES = {
    "running": ("running", "bright_blue"), "finished": ("finished", "green"), "ended": ("ended when asked to", "yellow"),
    "failed": ("failed", "red"), "dead": ("gone without a word", "red"), "over": ("over", "default"),
}  # fmt: skip
_CURVE_WIDTH, _CURVE_HEIGHT, _LABEL = 38, 5, 9
_MOST_CURVES = 6
_MOST_STAGES = 8


def watch(run_dirs: Sequence[Path], *, once: bool = False, seconds: float = 2.0, console: Console | None = None) -> None:
    """Show runs until all of them are over; raise ValueError if a directory does not exist.

    With `once`, or if stdout is no terminal, print a single frame.
    """
    views, console = [RunView(run_dir) for run_dir in run_dirs], console or Console(file=raw(sys.stdout), highlight=False)
    if not once and console.is_terminal and any(view.state == "running" for view in views):
        with Live(frame(views, console.width, console.height), console=console, screen=True, auto_refresh=False) as live:
            while any(view.state == "running" for view in views):
                time.sleep(seconds)
                for view in views:
                    view.refresh()
                live.update(frame(views, console.width, console.height), refresh=True)
    console.print(frame(views, console.width))


def frame(views: Sequence[RunView], width: int, height: int | None = None) -> RenderableType:
    """Return the whole display for a terminal of this width; with `height`, only as much as fits into so many lines."""
    parts: list[tuple[int, RenderableType]] = [_runs(views, width)]
    columns = max(1, width // _CURVE_WIDTH)
    curves = _curves(views, width // columns)
    rows = math.ceil(min(len(curves), _MOST_CURVES) / columns)
    if height is not None:
        # The remaining lines are for stages and samples.
        rows = max(1, min(rows, (height - parts[0][0] - 12) // (_CURVE_HEIGHT + 3)))
    for row in range(rows):
        line = Table.grid(expand=False)
        line.add_row(*curves[row * columns : (row + 1) * columns])
        parts.append((_CURVE_HEIGHT + 3, line))
    stages = _stages(views, width)
    if height is None or sum(lines for lines, _ in parts) + stages[0] + 6 <= height:
        parts.append(stages)
    left = None if height is None else height - sum(lines for lines, _ in parts)
    parts.append(_samples(views, width, left))
    return Group(*(part for _, part in parts))


def _runs(views: Sequence[RunView], width: int) -> tuple[int, RenderableType]:
    """Return one or two lines for each run with its progress."""
    lines: list[RenderableType] = []
    for place, view in enumerate(views):
        word, style = _STATES[view.state]
        total = view.total
        words = [f"step {view.step} of {total}" if total else f"step {view.step}"]
        if (seconds := view.seconds_per_step) is not None:
            words.append(f"{_time(seconds)} a step")
        if (seconds := view.seconds_left) is not None:
            words.append(f"{_time(seconds)} left")
        for label, name in (("reward", "reward/mean"), ("tokens/s", "throughput/tokens_per_second")):
            if points := view.series(name):
                words.append(f"{label} {_short(points[-1][1])}")
        head = Text.assemble(
            (f"{_mark(place)} ", _COLORS[place % len(_COLORS)]),
            (plain(view.name, max(8, width // 4)), "bold"),
            "  ",
            (word, style),
            "  ",
        )
        lines.append(_cut(head + Text("  ".join(words)), width))
        if total:
            room = min(width, 80)
            done = round(min(1.0, view.step / total) * room)
            lines.append(Text.assemble(("━" * done, style), ("━" * (room - done), "dim")))
        if view.state in ("failed", "dead") and view.reason:
            lines.append(_cut(Text(plain(view.reason), "red"), width))
        for warning in view.warnings:
            lines += [Text(line, "yellow") for line in textwrap.wrap(f"warning  {plain(warning, 600)}", width)]
        if not view.rows:
            lines.append(Text("no metrics yet", "dim"))
    return len(lines) + 1, Group(*lines, Text(""))


def _curves(views: Sequence[RunView], width: int) -> list[RenderableType]:
    curves: list[RenderableType] = []
    for title, patterns in CURVES:
        names = sorted({name for view in views for row in view.rows for name in row})
        matching = (name for pattern in patterns for name in names if fnmatchcase(name, pattern))
        name = next(matching, None)
        if name is None:
            continue
        marks = [f"{_mark(place)} " if len(views) > 1 else "" for place in range(len(views))]
        series = [
            (points, _COLORS[place % len(_COLORS)], marks[place])
            for place, view in enumerate(views)
            if (points := view.series(name))
        ]
        if not series:
            continue
        head = Text.assemble(
            (title, "bold"), *((f" {mark}{_short(points[-1][1])}", color) for points, color, mark in series)
        )
        low, high = (pick(value for points, *_ in series for _, value in points) for pick in (min, max))
        first, last = (pick(step for points, *_ in series for step, _ in points) for pick in (min, max))
        inner = max(10, width - _LABEL - 3)
        labels = [_short(high), *[""] * (_CURVE_HEIGHT - 2), _short(low)]
        cells = braille([points for points, *_ in series], inner, _CURVE_HEIGHT)
        styles = {place: color for place, (_, color, _) in enumerate(series)} | {-1: ""}
        body = [
            Text.assemble((f"{label:>{_LABEL}} ", "dim"), *((mark, styles[owner]) for mark, owner in row))
            for label, row in zip(labels, cells, strict=True)
        ]
        foot = Text(f"{'step':>{_LABEL}} {first}{last!s:>{max(1, inner - len(str(first)))}}", "dim")
        curves.append(Group(_cut(head, width - 1), *body, foot, Text("")))
    return curves


def _stages(views: Sequence[RunView], width: int) -> tuple[int, RenderableType]:
    """Return shares of the latest steps as bars."""
    lines: list[RenderableType] = []
    for place, view in enumerate(views):
        seconds = {name: value for name, value in view.stage_seconds().items() if name != "step"}
        total = sum(seconds.values())
        if not total:
            continue
        title = "stages of the latest steps" + (f", {plain(view.name)}" if len(views) > 1 else "")
        lines.append(_cut(Text(title, "bold"), width))
        room = max(5, width - 34)
        for name, value in list(seconds.items())[:_MOST_STAGES]:
            bar = "█" * max(1, round(value / total * room)) if value / total > 0.002 else ""
            label = f"{plain(name)[:14]:>14} {value / total:4.0%} {_time(value):>9} "
            lines.append(_cut(Text.assemble(label, (bar, _COLORS[place % len(_COLORS)])), width))
    return len(lines) + 1, Group(*lines, Text(""))


def _samples(views: Sequence[RunView], width: int, height: int | None) -> tuple[int, RenderableType]:
    """Return the latest samples of the runs, the last step first: question, then response."""
    most = 4 if height is None else max(0, (height - 2) // 2)
    # The row of a group's first sample has the group's rewards.
    firsts = [[row for row in reversed(view.samples) if row.get("sample") in (None, 0)][:most] for view in views]
    by_age = [(age, place, row) for place, samples in enumerate(firsts) for age, row in enumerate(samples)]
    rows = [(place, row) for _, place, row in sorted(by_age, key=lambda item: (-item[2]["step"], item[:2]))]
    lines: list[RenderableType] = [Text("latest samples", "bold")] if rows else []
    for place, row in rows[:most]:
        reward = row["reward"] if is_number(row.get("reward")) else None
        mark = f"{_mark(place)} " if len(views) > 1 else ""
        head = Text.assemble(
            (f"{mark}step {row['step']} ", _COLORS[place % len(_COLORS)]),
            (f"{plain(row.get('kind'), 12)} ", "dim"),
            (f"reward {'–' if reward is None else _short(reward)}", "green" if (reward or 0) > 0 else "red"),
            _against_group(reward, row.get("group_rewards")),
            f", {row['response_tokens']} tokens" if is_number(row.get("response_tokens")) else "",
        )
        question = row["question"] if row.get("question") is not None else row.get("prompt")
        lines.append(_cut(head + Text(f"  {plain(question, width)}", "dim"), width))
        lines.append(_cut(Text("    " + plain(row.get("response"), width)), width))
    return len(lines), Group(*lines)


def _against_group(reward: float | None, group: Any) -> str:
    """Return how far a reward is from the mean of its group, if the row has the group's rewards."""
    rewards = [value for value in group if is_number(value)] if isinstance(group, list) else []
    if reward is None or len(rewards) < 2:
        return ""
    if min(rewards) == max(rewards):
        return f" (all {len(rewards)} equal)"
    return f" ({reward - sum(rewards) / len(rewards):+.3g} to its group)"


def _mark(place: int) -> str:
    return _MARKS[place % len(_MARKS)]


def plain(text: Any, most: int = 200) -> str:
    """Return the text as one line without terminal control characters, which models also write."""
    words = " ".join(("" if text is None else str(text))[: 8 * most].split())
    return "".join(char if char.isprintable() else "�" for char in words)[:most]


def _cut(text: Text, width: int) -> Text:
    text.truncate(max(1, width), overflow="ellipsis")
    text.no_wrap = True
    return text


def _short(value: float) -> str:
    return f"{value:.3g}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
