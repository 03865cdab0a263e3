"""Reports of a step's updates -> its metrics."""

from __future__ import annotations

import math

from fivefold.types import RolloutStats, StepReport


def update_metrics(reports: list[StepReport], model: str) -> dict[str, float]:
    """Metrics of a step's updates of one model: the mean, of maxima the largest, of how far the rollout was the first."""
    combined = {}
    good = [report for report in reports if not report.skipped] or reports
    for name in dict.fromkeys(name for report in good for name in report.metrics):
        # An update that computes no token has no means.
        values = [report.metrics[name] for report in good if name in report.metrics]
        key = f"{model}/{name}" if model != "policy" and name.startswith("moe/") else name
        if name.startswith("rollout/"):
            combined[key] = values[0]
        elif name.endswith("_max"):
            combined[key] = max(values)
        else:
            combined[key] = math.fsum(values) / len(values)
    if "policy/kl_old" in combined:
        combined["policy/kl_old_last"] = [r.metrics["policy/kl_old"] for r in good if "policy/kl_old" in r.metrics][-1]
    if (scale := reports[-1].loss_scale) is not None:
        combined[f"{model}/loss_scale"] = scale
    return {
        **combined,
        f"{model}/loss": math.fsum(report.loss for report in good) / len(good),
        f"{model}/grad_norm": math.fsum(report.grad_norm for report in good) / len(good),
        f"{model}/lr": good[-1].lr,
        f"{model}/skipped_updates": float(sum(report.skipped for report in reports)),
    }


def throughput(
    stats: RolloutStats, reports: list[StepReport], times: dict[str, float], tflop: float, world_size: int
) -> dict[str, float]:
    """Tokens, samples and floating-point operations per second; `tflop` are those of the step's training in 1e12.

    A token of the step counts once, one that is trained on as often as that happens.
    """
    if not reports or "step" not in times:
        # The run was asked to end before the step's time was known.
        return {}
    trained = sum(report.tokens for report in reports)
    return {
        "throughput/tokens_per_second": int(stats.lengths_N.sum()) / times["step"],
        "throughput/samples_per_second": len(stats) / times["step"],
        "throughput/train_tokens_per_second": trained / times["train"],
        "throughput/tflops_per_gpu": tflop / times["train"] / world_size,
    }
