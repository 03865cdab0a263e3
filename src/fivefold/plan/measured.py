"""Measured rates that come with Fivefold, one row a kind of kernel and size: data for `efficiency.py`. No torch here."""

from __future__ import annotations

from fivefold.plan.efficiency import Rate

_H200 = "h200-141g"
_KERNELS = "kernels timed one by one, torch 2.11"
_STEPS = "set by whole steps of benchmarks/results"
_ASSUMED = "assumed, whole steps agree"
_ENGINES = "set by benchmarks/results/h200-x4-engines.txt"


def _rows(kind: str, source: str, rates: dict[float, float], hardware: str = _H200) -> tuple[Rate, ...]:
    return tuple(Rate(kind, size, rate, hardware, source) for size, rate in rates.items())


MEASURED: tuple[Rate, ...] = (
    *_rows("gemm", _ASSUMED, {128: 150, 512: 430}),
    *_rows("gemm", _STEPS, {1024: 600}),
    *_rows("gemm", _KERNELS, {2048: 720, 4096: 750, 8192: 789}),
    *_rows("grouped_gemm", _ASSUMED, {16: 60, 128: 220}),
    *_rows("grouped_gemm", "benchmarks/results/h200-x4-options.txt", {512: 355}),
    *_rows("attention_forward", _KERNELS, {1024: 208, 4096: 301, 8192: 318}),
    *_rows("attention_backward", _KERNELS, {1024: 167, 4096: 254, 8192: 282}),
    *_rows("elementwise", _KERNELS + " (SwiGLU)", {0: 930}),
    *_rows("head_forward", _KERNELS, {0: 282}),
    *_rows("head_backward", "policy less critic, benchmarks/results/h200-x4-methods.txt", {2048: 124}),
    *_rows("head_backward", "that of 2048, less or more of the sum of its weight's gradient", {1024: 163, 4096: 84}),
    *_rows("adam", _STEPS, {0: 1000}),
    *_rows("gradients", _ASSUMED, {0: 2500}),
    *_rows("node_link", "NCCL, four GPUs, messages of gigabytes", {1e9: 335}),
    *_rows("node_link", _ASSUMED, {1e6: 40, 1e8: 250}),
    *_rows("node_exchange", _ASSUMED, {1e6: 30, 1e8: 150}),
    *_rows("host_copy", "benchmarks/results/h200-x4-options.txt", {0: 50}),
    *_rows("layer_host", _STEPS, {0: 4900}),
    *_rows("tensor_host", _STEPS, {0: 3300}),
    *_rows("context_host", _STEPS, {0: 6000}),
    *_rows("expert_host", _STEPS, {0: 3000}),
    *_rows("update_host", _ASSUMED, {0: 20000}),
    *_rows("decode_memory", _ENGINES, {0: 4000}),
    *_rows("decode_host", _ENGINES, {0: 2900}),
    *_rows("sequence_host", _ENGINES, {0: 14.5}),
    *_rows("server_host", _ENGINES, {0: 5}),
    *_rows("eager_layer", "set by benchmarks/results/h200-x1.txt", {0: 1800}),
    *_rows("decode_reduce", _ENGINES, {0: 25}),
    *_rows("wake", _ENGINES, {0: 350000}),
)
