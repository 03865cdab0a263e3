"""Runs -> one HTML page that needs no network: a file, or the live page of `serve`. No torch here."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache, reduce
from importlib.resources import files
from operator import or_
from pathlib import Path
from string import Template
from typing import Any

from fivefold.config.roles import LEARNERS, ROLES
from fivefold.config.schema import UMASK
from fivefold.files import with_umask, write_whole
from fivefold.observability.constant import constant_reasons
from fivefold.observability.curve import load_metrics
from fivefold.observability.differences import differences, settings
from fivefold.observability.distributions import histograms
from fivefold.observability.metrics import find, labelled
from fivefold.observability.run_view import RunView
from fivefold.observability.thinning import thin
from fivefold.observability.timeline import stage_color, timeline

Chart = tuple[str, tuple[str, ...]]
"""Title and the metrics that are drawn in it, as patterns."""


def _labelled(model: str) -> list[tuple[str, str]]:
    """Return (pattern, label) of each chart of a model other than the policy: a labelled metric and those whose names end
    alike."""
    return [(name.replace("/", "/*"), label) for name, label in labelled(model).items()]


CHARTS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Reward and evaluation",
        (
            ("Reward", ("reward/mean", "reward/std")),
            ("Validation accuracy", ("val/*/accuracy", "val/*/mean@*", "val/*/pass@*")),
            ("Groups", ("reward/pass@*", "reward/mean@*", "reward/solve_all", "reward/solve_none")),
            ("Validation loss", ("val/loss",)),
            ("Validation pairs", ("val/accuracy", "val/margin")),
            ("Dynamic sampling: prompts with reward variance", ("dynamic_sampling/kept_fraction",)),
        ),
    ),
    (
        "Responses",
        (
            ("Response length, tokens", ("response/length_mean", "response/length_max")),
            ("Truncated and repetitive responses", ("response/truncated_fraction", "response/repetition")),
            ("Turns of a trajectory", ("turns/mean", "turns/max")),
            ("How trajectories end", ("trajectory/end_*",)),
        ),
    ),
    (
        "Policy",
        (
            ("Loss", ("policy/loss",)),
            ("Gradient norm", ("policy/grad_norm",)),
            ("Entropy", ("policy/entropy",)),
            ("KL to the reference", ("policy/kl_reference",)),
            ("Ratio", ("policy/ratio_mean",)),
            ("Clipped tokens", ("policy/clip_fraction",)),
            ("KL from the policy before the step", ("policy/kl_old", "policy/kl_old_last")),
            ("Learning rate", tuple(f"{model}/lr" for model in LEARNERS)),
        ),
    ),
    (
        "Other models that learn",
        tuple(
            (f"{ROLES[model].title.capitalize()}: {label}", (pattern,))
            for model in LEARNERS[1:]
            for pattern, label in (*_labelled(model), (f"{model}/loss", "loss"))
        ),
    ),
    (
        "Engine",
        (
            (
                "Engine against trainer: log-prob difference",
                ("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/kl"),
            ),
            (
                "Correction of the rollout",
                (
                    "rollout_correction/weight_mean",
                    "rollout_correction/masked_fraction",
                    "rollout_correction/effective_sample_size",
                ),
            ),
            ("Sampling ahead: age of samples in steps", ("async/staleness_mean", "async/staleness_max")),
            ("Sampling ahead: groups not used yet", ("async/unused_groups", "async/complete_groups")),
            ("Sampling ahead: who waits, seconds", ("async/trainer_wait_seconds", "async/engine_wait_seconds")),
        ),
    ),
    (
        "Speed and memory",
        (
            ("Tokens a second", ("throughput/tokens_per_second", "throughput/train_tokens_per_second")),
            ("Seconds a step", ("time/step",)),
            ("Peak memory, GiB", ("memory/peak_gb",)),
        ),
    ),
)
"""Section -> its charts, in the order in which they are shown."""
NUMBERS = (
    "reward/mean",
    "val/*/accuracy",
    "val/*/mean@*",
    "val/loss",
    "policy/loss",
    "policy/entropy",
    "policy/kl_reference",
    "critic/explained_variance",
    "response/length_mean",
    "rollout/logprob_diff_mean",
    "throughput/tokens_per_second",
)
"""Metrics in the table, as patterns."""
_MOST_IN_A_FILE = 500
"""Largest number of samples per run in a page that is a file."""
_SAMPLE_BYTES = 10**6
"""Largest size of the samples of all runs together in such a page, as JSON."""
_TRANSCRIPT_BYTES = 10**6
"""Largest size of the transcripts of a run in a page, as JSON."""
_CURVE_BYTES = 2.5 * 10**6
"""Approximate size of the curves of all runs together in a page, as JSON."""
_SCRIPTS = ("base.js", "curves.js", "histograms.js", "times.js", "samples.js", "transcripts.js", "page.js")
"""Parts of the page's one script."""
Have = tuple[int, int, int]
"""State of a run in a browser's page: generation, rows, samples."""
NOTHING: Have = (-1, 0, 0)


def write_report(run_dirs: Sequence[Path]) -> Path:
    """Write report.html with all runs into the first directory; raise ValueError if a directory has no metrics.

    It holds prompts and responses, so it has the permissions of a file of each of these runs.
    """
    views = [RunView(run_dir) for run_dir in run_dirs]
    for run_dir in run_dirs:
        load_metrics(run_dir)
    out = run_dirs[0] / "report.html"
    text = page(views, most_samples=_MOST_IN_A_FILE)
    with with_umask(f"{reduce(or_, map(_umask, views)):o}"):
        write_whole(out, text)
    return out


def _umask(view: RunView) -> int:
    """Return the permissions that a run removes from its files; all of other users if its configuration does not say."""
    trainer = settings(view.config).get("trainer")
    text = trainer.get("umask") if isinstance(trainer, dict) else None
    return int(text, 8) if isinstance(text, str) and UMASK.fullmatch(text) else 0o077


def page(views: Sequence[RunView], *, is_live: bool = False, most_samples: int | None = None) -> str:
    """Return the whole page; a live page requests updates from its server."""
    data = {
        **news(views, []),
        "live": is_live,
        "charts": CHARTS,
        "numbers": NUMBERS,
        "meanings": {name: _meaning(name) for view in views for row in view.rows for name in row},
    }
    if most_samples is not None:
        for run in data["runs"]:
            run["samples"] = _latest(run["samples"][-most_samples:], _SAMPLE_BYTES // len(views))
    script = "".join(map(_part, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = html.escape(", ".join(view.name for view in views))
    # Inside a script element, only `<` could end it or open another one.
    content = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return Template(_part("page.html")).substitute(
        title=f"{title} - Fivefold", hash=digest, style=_part("page.css"), data=content, script=script
    )


def news(views: Sequence[RunView], have: Sequence[Have]) -> dict[str, Any]:
    """Return the state of each run, the rows and samples that the page does not have yet, and what compares the runs."""
    share = _CURVE_BYTES / max(1, len(views))
    return {
        "runs": [_news(view, have[at] if at < len(have) else NOTHING, share) for at, view in enumerate(views)],
        "histograms": histograms([view.distributions for view in views]),
        "differences": differences([view.config for view in views]),
    }


def _news(view: RunView, have: Have, curve_bytes: float) -> dict[str, Any]:
    _, rows, samples = have if have[0] == view.generation else NOTHING
    names = {name for row in view.rows[rows:] for name in row}
    # Bytes per value: a name in quotes, six digits, separators, and the step.
    most_values = int(curve_bytes / (sum(map(len, names)) / max(1, len(names)) + 24))
    lanes = timeline(list(view.stages))
    stages = {*view.stage_names, *(name for name, *_ in (lanes or {"stages": []})["stages"])}
    new_samples = list(view.samples)[max(0, samples - view.dropped) :]
    shown, seconds = thin(view.rows[rows:], most_values)
    return {
        **({"thinned": {"rows": len(shown), "seconds": seconds}} if seconds else {}),
        "name": view.name,
        "path": str(view.run_dir),
        "state": view.state,
        "reason": view.reason,
        "warnings": view.warnings,
        "step": view.step,
        "total": view.total,
        "seconds_left": view.seconds_left,
        "seconds_per_step": view.seconds_per_step,
        "generation": view.generation,
        "rows": shown,
        "rows_end": len(view.rows),
        "samples": new_samples,
        "samples_end": view.dropped + len(view.samples),
        # Transcripts are written with samples, and the page keeps the ones that it has.
        **({"transcripts": _latest(list(view.transcripts), _TRANSCRIPT_BYTES)} if new_samples else {}),
        "timeline": lanes,
        "stage_colors": {name: stage_color(name) for name in sorted(stages)},
        "config": view.config,
        "constant": constant_reasons(settings(view.config), view.rows),
    }


def _latest(samples: list[dict[str, Any]], most_bytes: float) -> list[dict[str, Any]]:
    """Return the last samples that fit in `most_bytes`, at least the very last one."""
    count, total = 0, 0.0
    for sample in reversed(samples):
        text = json.dumps(sample, ensure_ascii=False)
        total += len(text.encode("utf-8", errors="replace")) + 5 * text.count("<")
        if count and total > most_bytes:
            break
        count += 1
    return samples[len(samples) - count :]


@cache
def _part(name: str) -> str:
    return (files("fivefold.observability") / "page" / name).read_text(encoding="utf-8")


@cache
def _meaning(name: str) -> str:
    metric = find(name)
    return "" if metric is None else f"{metric.meaning} [{metric.unit}]"
