"""Device time by purpose: kernels of a GPU and operators of a CPU, classified by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import profiler

_MARKS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "cutlass___call__", "kernel_cutlass", "scaled_dot_product"),
    "products": ("nvjet", "gemm", "cutlass", "splitk", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "grouped_mm"),
    "logits": ("_row_sums", "_row_gradient"),
    "heads": ("_heads",),
    "swiglu": ("_swiglu",),
    "norms": ("layer_norm", "rms_norm", "gammabeta"),
    "optimizer": ("adam", "multi_tensor", "optimizer", "nrm", "normtwo"),
    "compiled": ("triton_",),
    "communication": ("nccl",),
    "zeros": ("memset", "fill", "aten::zero"),
    "copies": ("copy", "cat", "memcpy"),
}
"""Kind -> substrings of the names of its kernels; the first match counts."""
OTHERS = "element-wise and others"


def seconds_by_kind(work: Callable[[], Any], device: torch.device, times: int = 1) -> dict[str, float]:
    """Return the device's seconds for one run of `work` by kind; host time in between is not counted."""
    is_cuda = device.type == "cuda"
    activity = profiler.ProfilerActivity.CUDA if is_cuda else profiler.ProfilerActivity.CPU
    with profiler.profile(activities=[activity]) as profiled:
        for _ in range(times):
            work()
        if is_cuda:
            torch.cuda.synchronize(device)
    seconds = dict.fromkeys([*_MARKS, OTHERS], 0.0)
    for event in profiled.key_averages():
        spent = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        # An optimizer's step is a span that contains its kernels, so counting it would count them twice.
        if spent > 0 and not event.key.startswith("Optimizer."):
            seconds[_kind(event.key.lower())] += spent / 1e6 / times
    return seconds


def _kind(name: str) -> str:
    return next((kind for kind, marks in _MARKS.items() if any(mark in name for mark in marks)), OTHERS)
