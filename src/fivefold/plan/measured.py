"""Measured rates that come with Fivefold, one row per kind of kernel and size: data for `efficiency.py`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

_H200 = "h200-141g"
_STEP = "benchmarks/results/h200-step.txt"
_FULL = f"{_STEP}, 8 x 4096: full recomputation less none is the forward"
_ALONE = f"as the kernel alone goes with the length, {_STEP}"
_HOST = f"their sum set by 0.6B t2, divided as before, {_STEP}"
_STEPS = "set by whole steps of benchmarks/results"
_CALIBRATED = "benchmarks/results/h200-calibration.txt"
_ASSUMED = "assumed, whole steps agree"
_ENGINES = "set by benchmarks/results/h200-x4-engines.txt"
_EXPERTS = "set by benchmarks/results/h200-x2-experts.txt"
_LIMIT = "set by benchmarks/results/h200-engine-limit.txt"


@dataclass(frozen=True)
class Rate:
    """One measured rate."""

    kind: str
    size: float
    """Size at which the rate was measured; 0 if the kind has no sizes."""
    rate: float
    """Measured rate, in the unit of its kind."""
    hardware: str
    """Name in the table of GPUs, or cpu."""
    source: str
    """Source of the measurement."""


def _rows(kind: str, source: str, rates: dict[float, float], hardware: str = _H200) -> tuple[Rate, ...]:
    return tuple(Rate(kind, size, rate, hardware, source) for size, rate in rates.items())


MEASURED: tuple[Rate, ...] = (
    *_rows("gemm", _ASSUMED, {128: 150, 512: 430}),
    *_rows("gemm", _STEPS, {1024: 600}),
    *_rows("gemm", f"{_STEP}, products of 1.7B on 8 x 4096 and 64 x 1024", {2048: 715}),
    *_rows("gemm", f"{_STEP}, products of 8B on d2t2 and d1t4 (alone 775)", {4096: 680, 8192: 680}),
    *_rows("grouped_gemm", _CALIBRATED, {16: 25, 128: 206, 512: 512, 1024: 550, 2048: 550, 4096: 591}),
    *_rows("attention_forward", _FULL, {4096: 529}),
    *_rows("attention_forward", _ALONE, {1024: 327, 8192: 574}),
    *_rows("attention_backward", _FULL, {4096: 458}),
    *_rows("attention_backward", _ALONE, {1024: 266, 8192: 541}),
    *_rows("torch_attention_forward", f"{_FULL}, copies around it included", {4096: 225}),
    *_rows("torch_attention_forward", f"{_STEP}, 64 x 1024: divided as the kernel alone", {1024: 114}),
    *_rows("torch_attention_forward", _ALONE, {8192: 256}),
    *_rows("torch_attention_backward", f"{_FULL}, copies around it included", {4096: 238}),
    *_rows("torch_attention_backward", f"{_STEP}, 64 x 1024: divided as the kernel alone", {1024: 164}),
    *_rows("torch_attention_backward", _ALONE, {8192: 259}),
    *_rows("elementwise", f"{_STEP}, norms, copies and others of 1.7B and 8B", {0: 2000}),
    *_rows("heads", f"{_STEP}, heads of 8B on d1t4 and d2t2", {12: 1620, 24: 1620}),
    *_rows("heads", f"{_STEP}, heads of 1.7B", {32: 2720}),
    *_rows("swiglu", f"{_STEP}, swiglu of 1.7B and 8B", {0: 4200}),
    *_rows("head_forward", f"{_STEP}, sums of block 2048, 8 warps; with the next the logits of 1.7B and 8B", {0: 3270}),
    *_rows("head_backward", f"{_STEP}, grad of block 2048, 8 warps", {0: 3950}),
    *_rows("adam", f"{_STEP}, optimizer of 1.7B: AdamW, norm and scaling together", {0: 4190}),
    *_rows("gradients", f"{_STEP}, optimizer of 1.7B", {0: 4190}),
    *_rows("node_link", _CALIBRATED, {1e6: 30, 1e7: 142, 1e8: 279, 1e9: 325}),
    *_rows("node_exchange", _CALIBRATED, {1e6: 18, 1e7: 160, 1e8: 276, 1e9: 334}),
    *_rows("host_copy", "benchmarks/results/h200-x4-options.txt", {0: 50}),
    *_rows("host_adam", "0.24 s for AdamW, 0.44 s for the norm, 0.06 s for clipping 1e9 parameters; 16 cores", {0: 54}),
    *_rows("layer_host", _HOST, {0: 2550}),
    *_rows("tensor_host", _HOST, {0: 1730}),
    *_rows("context_host", "set by whole steps before", {0: 6000}),
    *_rows("expert_host", f"{_EXPERTS}, three layouts of 30B-A3B", {0: 3000}),
    *_rows("fsdp_host", "set by 1.7B fsdp:d1, benchmarks/results/h200-fsdp.txt", {0: 8500}),
    *_rows("update_host", f"{_STEP}, seconds less kernels of 1.7B, mean of six rows", {0: 25000}),
    *_rows("decode_memory", _ENGINES, {0: 4000}),
    *_rows("shared_decode_memory", f"{_LIMIT}, large-alone-2", {0: 2100}),
    *_rows("decode_host", _ENGINES, {0: 2900}),
    *_rows("sequence_host", _LIMIT, {256: 10.5, 1024: 27}),
    *_rows("logprob_host", "1.7B with and without flat log-probs, benchmarks/results/h200-x4-engines.txt", {0: 3.9}),
    *_rows("object_host", _LIMIT, {256: 18, 1024: 11.5}),
    *_rows("server_host", _ENGINES, {0: 5}),
    *_rows("eager_layer", "set by benchmarks/results/h200-x1.txt", {0: 1800}),
    *_rows("decode_reduce", _ENGINES, {0: 25}),
    *_rows("wake", _ENGINES, {0: 350000}),
)
