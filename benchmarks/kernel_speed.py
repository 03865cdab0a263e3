"""The kernels of the training step one by one, next to what PyTorch, torch.compile, Megatron-Core and liger-kernel have.

`python benchmarks/kernel_speed.py [PART ...] [--seconds N]`: every part (`PARTS` below), or those named, each for N seconds
at most. It needs a GPU; packages that are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Part, run

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

VOCABULARY, WIDTH, FFN, HEADS, GROUPS, HEAD = 151936, 2048, 6144, 16, 8, 128
TOKENS = 16384


def milliseconds(work: Callable[[], Any], rounds: int = 8) -> float:
    """The median, by the GPU's own clock."""
    for _ in range(3):
        work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in marks)[rounds // 2]


def both_ways(work: Callable[[], Any], inputs: Sequence[Tensor], upstream: Any) -> tuple[float, float]:
    """Forward, and what backward adds to it."""
    forward = milliseconds(work)
    return forward, milliseconds(lambda: torch.autograd.grad(work(), inputs, upstream)) - forward


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


# --- what runs on a rank ---------------------------------------------------------------------------------------------


def head(mesh: Mesh) -> dict[str, Any]:
    """TFLOP/s of the vocabulary's products and TB/s of the two passes over logits, by tokens in a chunk."""
    weight, buffer = random(VOCABULARY, WIDTH), torch.zeros(VOCABULARY, WIDTH, device="cuda")
    return {f"{rows} tokens": chunk(rows, weight, buffer) for rows in (441, 1767, 3534, 7068)}


def chunk(rows: int, weight: Tensor, buffer: Tensor) -> dict[str, float]:
    from fivefold.backend.kernels.logits import row_gradient, row_sums

    hidden, targets = random(rows, WIDTH), torch.randint(0, VOCABULARY, (rows,), device="cuda")
    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    zeros, grad, half = torch.zeros(rows, device="cuda"), random(rows, VOCABULARY), torch.bfloat16
    teraflop, terabytes = 2e-12 * rows * VOCABULARY * WIDTH, 1e-12 * rows * VOCABULARY
    work: dict[str, tuple[float, Callable[[], Any]]] = {
        "logits": (teraflop, lambda: torch.mm(hidden, weight.t(), out_dtype=torch.float32)),
        "gradient of hidden": (teraflop, lambda: grad @ weight),
        "gradient of weight": (
            teraflop, lambda: torch.addmm(buffer, grad.t(), hidden, out_dtype=torch.float32, out=buffer)
        ),
        "sums of rows": (4 * terabytes, lambda: row_sums(logits, targets, 1.0)),
        "gradient of rows": (
            6 * terabytes, lambda: row_gradient(logits, targets, (zeros, zeros, zeros, zeros), 1.0, half)
        ),
    }  # fmt: skip
    return {name: round(size / milliseconds(one) * 1e3, 2) for name, (size, one) in work.items()}


def heads(mesh: Mesh) -> dict[str, Any]:
    """Milliseconds forward and backward of heads that are split, normed and rotated: PyTorch, compiled, ours."""
    from fivefold.backend.kernels.rotary import norm_rotate

    heads_of_group = HEADS // GROUPS
    mixed = random(TOKENS, GROUPS, (heads_of_group + 2) * HEAD, grad=True)
    norms = [torch.ones(HEAD, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    angles = torch.rand(TOKENS, HEAD // 2, device="cuda").repeat(1, 2)
    cosines, sines = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return (x * cosines[:, None] + torch.cat((-two, one), -1) * sines[:, None]).bfloat16()

    def plain(mixed: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        query, key, value = mixed.split([heads_of_group * HEAD, HEAD, HEAD], -1)
        query = F.rms_norm(query.reshape(TOKENS, HEADS, HEAD), (HEAD,), norms[0], 1e-6)
        return rotate(query.float()), rotate(F.rms_norm(key, (HEAD,), norms[1], 1e-6).float()), value.contiguous()

    compiled = torch.compile(plain, dynamic=True)
    upstream = [torch.randn_like(tensor) for tensor in plain(mixed, *norms)]
    ways = {
        "PyTorch": lambda: plain(mixed, *norms),
        "torch.compile": lambda: compiled(mixed, *norms),
        "ours": lambda: norm_rotate(mixed, cosines, sines, (norms[0], norms[1]), heads_of_group, HEAD, 1e-6),
    }
    return {name: [round(t, 3) for t in both_ways(work, [mixed, *norms], upstream)] for name, work in ways.items()}


def elementwise(mesh: Mesh) -> dict[str, Any]:
    """Milliseconds forward and backward of a norm, and of SwiGLU."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from fivefold.backend.kernels.swiglu import swiglu

    x, upstream = random(TOKENS, WIDTH, grad=True), random(TOKENS, WIDTH)
    weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    product, beyond = random(TOKENS, 2 * FFN, grad=True), random(TOKENS, FFN)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), weight, 1e-6)

    def gated(product: Tensor) -> Tensor:
        gate, up = product.chunk(2, -1)
        return F.silu(gate) * up

    compiled_norm, compiled_gate = torch.compile(norm, dynamic=True), torch.compile(gated, dynamic=True)
    norms: dict[str, Callable[[], Tensor]] = {
        "PyTorch": lambda: norm(x, weight), "torch.compile": lambda: compiled_norm(x, weight)
    }  # fmt: skip
    gates: dict[str, Callable[[], Tensor]] = {
        "PyTorch": lambda: gated(product), "torch.compile": lambda: compiled_gate(product),
        "Megatron-Core": lambda: bias_swiglu_impl(product.view(TOKENS, 1, -1), None).view(TOKENS, -1),
        "ours": lambda: swiglu(product),
    }  # fmt: skip
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        norms["liger-kernel"] = lambda: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)
    return {
        "norm": {name: [round(t, 3) for t in both_ways(work, [x, weight], upstream)] for name, work in norms.items()},
        "SwiGLU": {name: [round(t, 3) for t in both_ways(work, [product], beyond)] for name, work in gates.items()},
    }


def attention(mesh: Mesh) -> dict[str, Any]:
    """TFLOP/s forward and backward of causal attention over packed sequences."""
    lengths = {"4 x 4096": [4096] * 4, "8 x 4096": [4096] * 8, "16 x 1024": [1024] * 16, "2 x 8192": [8192] * 2}
    lengths["mixed"] = [100, 3000, 777, 2048, 1500, 4096, 30, 1333]
    return {name: packed(sizes) for name, sizes in lengths.items()}


def packed(sizes: list[int]) -> dict[str, list[int]]:
    from torch.nn.attention.varlen import varlen_attn

    from fivefold.backend.kernels import flash

    ends = torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)
    query, key, value = (random(sum(sizes), count, HEAD, grad=True) for count in (HEADS, GROUPS, GROUPS))
    most, upstream = max(sizes), random(sum(sizes), HEADS, HEAD)
    keys, values = (tensor.detach().repeat_interleave(HEADS // GROUPS, 1).requires_grad_() for tensor in (key, value))
    ways: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
        "PyTorch": (
            lambda: varlen_attn(query, keys, values, ends, ends, most, most, window_size=(-1, 0)), [query, keys, values]
        )
    }  # fmt: skip
    if flash.takes(query, value):
        ways["flash-attn-4"] = (
            lambda: flash.attention(query, key, value, (ends, ends), (most, most), None, HEAD**-0.5), [query, key, value]
        )  # fmt: skip
    teraflop = sum(2e-12 * HEADS * HEAD * size * size for size in sizes)
    speeds = {}
    for way, (work, inputs) in ways.items():
        forward, backward = both_ways(work, inputs, upstream)
        # Backward has 2.5 times the products of forward.
        speeds[way] = [round(teraflop / forward * 1e3), round(2.5 * teraflop / backward * 1e3)]
    return speeds


def optimizer(mesh: Mesh) -> dict[str, float]:
    """Milliseconds of AdamW on 2^28 parameters."""
    parameters = [torch.randn(1 << 26, device="cuda", requires_grad=True) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    ways: dict[str, dict[str, Any]] = {"tensor by tensor": {"foreach": True}, "fused": {"fused": True}}
    return {name: round(milliseconds(torch.optim.AdamW(parameters, **way).step), 2) for name, way in ways.items()}


def draws(mesh: Mesh) -> dict[str, Any]:
    """Milliseconds to draw a token of each row by its own key, log-probs included, as vLLM 0.26 does and as we do."""
    from fivefold.engines.vllm.draws import KeyedSampler

    def by_vllm(logits: Tensor, generators: dict[int, torch.Generator], *_: None) -> tuple[Tensor, Tensor]:
        probs = logits.softmax(-1)
        noise = torch.empty_like(probs)
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        drawn, logprobs = probs.div_(noise).argmax(dim=-1), logits.log_softmax(-1)
        of_drawn = logprobs.gather(1, drawn[:, None])
        return drawn, torch.cat([of_drawn, (logprobs >= of_drawn).sum(-1, keepdim=True)], 1).to("cpu", non_blocking=True)

    times = {}
    for rows, vocabulary in ((256, 49152), (1024, 49152), (256, VOCABULARY), (1024, VOCABULARY)):
        generators = {row: torch.Generator("cuda").manual_seed(row) for row in range(rows)}
        logits = random(rows, vocabulary).float()
        ways: dict[str, Callable[..., Any]] = {
            "vLLM": by_vllm,
            "one pass": KeyedSampler(by_vllm, lambda logits, k, p: logits, seed=0),
        }
        times[f"{rows} x {vocabulary}"] = {
            name: round(milliseconds(partial(draw, logits, generators, None, None)), 3) for name, draw in ways.items()
        }
    return times


# --- parts -----------------------------------------------------------------------------------------------------------


def part(function: Callable[..., Any]) -> Callable[[Part], None]:
    """Print what the function finds, by its rows."""

    def measured(part: Part) -> None:
        if not part.large:
            return part.say(function.__name__, "needs a GPU")
        for name, numbers in (part.measure(function.__name__, "d1", function) or {}).items():
            part.say(name, numbers)

    measured.__doc__ = function.__doc__
    return measured


PARTS: dict[str, Callable[[Part], None]] = {
    function.__name__: part(function) for function in (head, heads, elementwise, attention, optimizer, draws)
}


if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import kernel_speed

    sys.exit(run(kernel_speed.__doc__, kernel_speed.PARTS))
