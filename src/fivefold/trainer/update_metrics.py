"""Reports of a step's updates -> its metrics."""

from __future__ import annotations

import math

from fivefold.types import RolloutStats, StepReport


def update_metrics(reports: list[StepReport], model: str) -> dict[str, float]:
    """Combine a model's update metrics of a step: the mean; the largest of maxima; for `rollout/` metrics the first."""
    combined = {}
    good = [report for report in reports if not report.skipped] or reports
    for name in dict.fromkeys(name for report in good for name in report.metrics):
        # An update without tokens has no means.
        values = [report.metrics[name] for report in good if name in report.metrics]
        is_shared = "/" not in name or (model != "policy" and name.startswith("moe/"))
        key = f"{model}/{name}" if is_shared else name
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
    """Tokens, samples and floating-point operations per second; `tflop` is the step's training work in 10^12 operations.

    A token of the step counts once for `tokens_per_second`, and once per update for `train_tokens_per_second`.
    """
    if not reports or "step" not in times:
        # A signal ended the run before the step's time was recorded.
        return {}
    trained = sum(report.tokens for report in reports)
    return {
        "throughput/tokens_per_second": int(stats.lengths_N.sum()) / times["step"],
        "throughput/samples_per_second": len(stats.trajectories) / times["step"],
        "throughput/train_tokens_per_second": trained / times["train"],
        "throughput/tflops_per_gpu": tflop / times["train"] / world_size,
    }
