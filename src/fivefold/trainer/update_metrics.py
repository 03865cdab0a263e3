"""Reports of a step's updates -> its metrics."""

from __future__ import annotations

import math
import resource

import torch

from fivefold.types import StepReport


def update_metrics(reports: list[StepReport], model: str) -> dict[str, float]:
    """Metrics of a step's updates of one model: the mean, of maxima the largest, of how far the rollout was the first."""
    combined = {}
    good = [report for report in reports if not report.skipped] or reports
    for name in reports[0].metrics:
        values = [report.metrics[name] for report in good]
        key = f"critic/{name}" if model == "critic" and name.startswith("moe/") else name
        if name.startswith("rollout/"):
            combined[key] = values[0]
        elif name.endswith("_max"):
            combined[key] = max(values)
        else:
            combined[key] = math.fsum(values) / len(values)
    if "policy/kl_old" in combined:
        combined["policy/kl_old_last"] = good[-1].metrics["policy/kl_old"]
    return {
        **combined,
        f"{model}/loss": math.fsum(report.loss for report in good) / len(good),
        f"{model}/grad_norm": math.fsum(report.grad_norm for report in good) / len(good),
        f"{model}/lr": good[-1].lr,
        f"{model}/skipped_updates": float(sum(report.skipped for report in reports)),
    }


def throughput(reports: list[StepReport], times: dict[str, float], tflop: float, world_size: int) -> dict[str, float]:
    """Tokens, samples and floating-point operations per second; `tflop` are those of the step's training in 1e12."""
    tokens, sequences = sum(report.tokens for report in reports), sum(report.sequences for report in reports)
    if not tokens:
        return {}
    return {
        "throughput/tokens_per_second": tokens / times["step"],
        "throughput/samples_per_second": sequences / times["step"],
        "throughput/train_tokens_per_second": tokens / times["train"],
        "throughput/tflops_per_gpu": tflop / times["train"] / world_size,
    }


def peak_bytes() -> float:
    """Largest memory that this rank has held: on the GPU where there is one."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
