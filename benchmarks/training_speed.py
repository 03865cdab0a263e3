"""How fast training is, and how much memory it takes, on the GPUs that are there; tiny on a CPU, for a look at the script.

`python benchmarks/training_speed.py [PART ...] [--seconds N]`: every part (`PARTS` below), or those named, each for N
seconds at most. What a part measures is printed as it comes; the exit code is 1 where something failed, or is slower or
larger than it should be. `make gpu-test` has the checks of the same models.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from benchmarks.harness import Part, peak_gib, run
from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.objective import make_objective
from fivefold.algo.values import ValueLoss
from fivefold.calibration.profile import seconds_by_kind
from fivefold.columns import Column
from fivefold.config.learners import OffloadConfig
from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec
from fivefold.plan.memory import Memory, Other, Sharded, estimate_memory, training_flops
from tests.support.gpu_models import (
    build,
    group_batch,
    is_large,
    layer_of_experts,
    random_batch,
    same_bits,
    timed,
    write_classifier,
)
from tests.support.objectives import Alone
from tests.support.shards import shard_of_replica
from tests.support.two_steps import OBJECTIVE

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

DENSE = ["d1", "t2", "p2", "d2", "t4", "d2t2", "t2p2", "d2p2"]
EXPERTS = ["d2e2", "t2e2", "c2e2", "d2t2e4", "d4e4", "t4e4", "c2t2e4"]
ROUNDED = 5e-3
"""Relative difference of a loss or a gradient norm in bfloat16 between layouts, which round at other places: products are
rounded to 2^-9."""


# --- what runs on a rank ---------------------------------------------------------------------------------------------


def training_step(mesh: Mesh, directory: Path, tokens: int, samples: int, length: int) -> dict[str, float]:
    """Steady step time, tokens a second, peak memory."""
    model = build(mesh, directory, "bfloat16", tokens)
    mine = random_batch(samples, length, model.spec.vocab).select(shard_of_replica(mesh.ranks, range(samples)))
    times = []
    for _ in range(4):
        seconds, report = timed(mesh, lambda: model.train_step(mine, OBJECTIVE.loss))
        times.append(seconds)
    seconds = min(times[1:])
    flops = training_flops(model.spec, report.tokens, report.tokens / report.sequences)
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(report.tokens / seconds),
        "tflops_per_gpu": round(flops / seconds / mesh.layout.world_size / 1e12, 1),
        "peak_gib": round(peak_gib(mesh), 2),
        "micro_batches": report.micro_batches,
        "tokens": report.tokens,
    }


def long_step(mesh: Mesh, directory: Path, length: int, samples: int, dtype: str) -> dict[str, float]:
    """The first update's loss and gradient norm on sequences of one length, steady step time, rate, peak memory."""
    # A context-parallel rank holds its share of a micro-batch, which is one whole sequence.
    model = build(mesh, directory, dtype, length, recompute="full")
    mine = random_batch(samples, length, model.spec.vocab, spread=0.0)
    mine = mine.select(shard_of_replica(mesh.ranks, range(samples)))
    runs = [timed(mesh, lambda: model.train_step(mine, OBJECTIVE.loss)) for _ in range(3)]
    (_, first), seconds = runs[0], min(one for one, _ in runs[1:])
    flops = training_flops(model.spec, first.tokens, first.tokens / first.sequences)
    return {
        "loss": first.loss,
        "grad_norm": first.grad_norm,
        "seconds": round(seconds, 3),
        "first_seconds": round(runs[0][0], 3),
        "tflops_per_gpu": round(flops / seconds / mesh.layout.world_size / 1e12, 1),
        "peak_gib": round(peak_gib(mesh), 2),
        "micro_batches": first.micro_batches,
    }


def memory_of_device(mesh: Mesh) -> float:
    """GiB that the device has; no limit on a CPU."""
    return torch.cuda.mem_get_info()[1] / 2**30 if is_large(mesh) else float("inf")


def gemm(mesh: Mesh) -> float:
    """TFLOP/s of a product of bfloat16 matrices: the limit that the steps are measured against."""
    size = 8192 if is_large(mesh) else 256
    one, other = torch.randn(2, size, size, device=mesh.device, dtype=torch.bfloat16)
    seconds = min(timed(mesh, lambda: [one @ other for _ in range(10)])[0] for _ in range(4)) / 10
    return 2 * size**3 / seconds / 1e12


def use_attention(mesh: Mesh, attention: str) -> bool:
    """Let this rank train with "flash-attn-4", or with PyTorch's attention ("torch"); return whether it can."""
    from fivefold.backend.kernels import flash

    if attention != "flash-attn-4":
        flash._available = lambda device: False  # type: ignore[assignment]
        return True
    return not is_large(mesh) or flash._available(mesh.device)


def row(
    mesh: Mesh, directory: Path, tokens: int, samples: int, length: int, recompute: str, attention: str
) -> dict[str, Any]:
    """A training step on sequences of one length, steady: seconds, rate, memory, and where the GPU's time goes."""
    if not use_attention(mesh, attention):
        return {"not measured": "flash-attn-4 is not installed"}
    model = build(mesh, directory, "bfloat16", tokens, recompute=recompute)
    mine = random_batch(samples, length, model.spec.vocab, spread=0.0)
    mine = mine.select(shard_of_replica(mesh.ranks, range(samples)))

    def step() -> Any:
        return model.train_step(mine, OBJECTIVE.loss)

    timed_steps = [timed(mesh, step) for _ in range(5)]
    seconds, report = min(one for one, _ in timed_steps[1:]), timed_steps[-1][1]
    flops = training_flops(model.spec, report.tokens, report.tokens / report.sequences)
    numbers = {
        "seconds": round(seconds, 4),
        "tflops_per_gpu": round(flops / seconds / mesh.layout.world_size / 1e12, 1),
        "peak_gib": round(peak_gib(mesh), 2),
        "micro_batches": report.micro_batches,
        "kernels_ms": kernels_of(mesh, step),
    }
    return numbers


def kernels_of(mesh: Mesh, step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the GPU's kernels in one step, by what they are for."""
    if not is_large(mesh):
        return {}
    return {kind: round(1e3 * spent, 1) for kind, spent in seconds_by_kind(step, mesh.device).items() if spent}


def waits_of(mesh: Mesh, directory: Path, tokens: int, samples: int, length: int) -> dict[str, Any]:
    """Where the GPU waits for the host in one step, and what makes the host wait for the GPU."""
    import warnings

    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    model = build(mesh, directory, "bfloat16", tokens)
    mine = random_batch(samples, length, model.spec.vocab, spread=0.0)
    mine = mine.select(shard_of_replica(mesh.ranks, range(samples)))
    for _ in range(3):
        timed(mesh, lambda: model.train_step(mine, OBJECTIVE.loss))
    if not is_large(mesh):
        return {}
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        timed(mesh, lambda: model.train_step(mine, OBJECTIVE.loss))
    seconds = time.perf_counter() - begin
    on_device = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in on_device)
    gaps, until, last = [], spans[0][0], "the beginning"
    for start, end, name in spans:
        if start > until + 50:
            gaps.append((round((start - until) / 1e3, 2), last[:60], name[:60]))
        if end > until:
            until, last = end, name
    small = sum(max(0.0, later[0] - earlier[1]) for earlier, later in pairwise(spans)) / 1e3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        model.train_step(mine, OBJECTIVE.loss)
        torch.cuda.set_sync_debug_mode("default")
    places = sorted({f"{Path(warning.filename).name}:{warning.lineno}" for warning in caught})
    return {
        "profiled_seconds": round(seconds, 3),
        "gaps_ms": round(sum(gap for gap, _, _ in gaps), 2),
        "all_gaps_ms": round(small, 2),
        "largest": sorted(gaps, reverse=True)[:12],
        "host_waits_at": places,
    }


def host_of(mesh: Mesh, directory: Path, tokens: int, samples: int, length: int, attention: str) -> dict[str, Any]:
    """Seconds of an update and of log-probs, and what the host does in the update: milliseconds and calls by name."""
    from torch.profiler import ProfilerActivity, profile

    if not use_attention(mesh, attention):
        return {"not measured": "flash-attn-4 is not installed"}
    model = build(mesh, directory, "bfloat16", tokens)
    batch = random_batch(samples, length, model.spec.vocab)
    timed_steps = [timed(mesh, lambda: model.train_step(batch, OBJECTIVE.loss)) for _ in range(5)]
    seconds, report = min(one for one, _ in timed_steps[1:]), timed_steps[-1][1]
    forward = min([timed(mesh, lambda: model.forward(batch))[0] for _ in range(4)][1:])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        timed(mesh, lambda: model.train_step(batch, OBJECTIVE.loss))
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    passes = report.micro_batches * model.spec.layers
    return {
        "seconds": round(seconds, 4),
        "log_probs": round(forward, 4),
        "micro_batches": report.micro_batches,
        "layer_ms": round(1e3 * seconds / passes, 3),
        "layer_log_probs_ms": round(1e3 * forward / passes, 3),
        "kernels_ms": kernels_of(mesh, lambda: model.train_step(batch, OBJECTIVE.loss)),
        "host_ms": {event.key[:60]: [round(event.self_cpu_time_total / 1e3, 2), event.count] for event in events[:25]},
    }


def transformers_step(
    mesh: Mesh, directory: Path, samples: int, length: int, spread: float = 0.5, tokens: int = 8192
) -> dict[str, float]:
    """The same training step as one would write it with transformers: bf16, SDPA, padded batches, fused AdamW.

    A micro-batch has at most so many `tokens` with its padding, or one sequence.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(mesh.device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=is_large(mesh))
    batch = random_batch(samples, length, model.config.vocab_size, spread=spread)
    parts: list[list[torch.Tensor]] = [[]]
    for row in sorted(batch.token_ids_T.split(batch.lengths_N), key=len):
        if parts[-1] and (len(parts[-1]) + 1) * len(row) > tokens:
            parts.append([])
        parts[-1].append(row)

    def step() -> None:
        for part in parts:
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(mesh.device)
            there = [torch.ones_like(row) for row in part]
            mask = torch.nn.utils.rnn.pad_sequence(there, batch_first=True).to(mesh.device)
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    seconds = min([timed(mesh, step)[0] for _ in range(3)][1:])
    return {
        "seconds": round(seconds, 3),
        "micro_batches": len(parts),
        "tokens_per_second": round(sum(batch.lengths_N) / seconds),
        "peak_gib": round(peak_gib(mesh), 2),
    }


def policy_and_critic(
    mesh: Mesh, directory: Path, critic_directory: Path, tokens: int, samples: int, length: int
) -> tuple[dict[str, float], float, int]:
    """Seconds of a step of policy and critic on the same tokens, and the peak of memory with both."""
    ppo = make_objective("ppo", gamma=0.99, lam=0.95)
    policy = build(mesh, directory, "bfloat16", tokens)
    critic = build(mesh, critic_directory, "bfloat16", tokens, value_head=True)
    batch = random_batch(samples, length, policy.spec.vocab)
    values_T, returns_T = torch.zeros(2, len(batch.token_ids_T))
    batch = batch.with_columns({Column.VALUES: values_T, Column.RETURNS: returns_T})
    scores = AdvantageInputs(torch.rand(samples), torch.arange(samples), torch.ones(samples))
    finished_N = torch.ones(samples, dtype=torch.bool)
    work: dict[str, Callable[[], Any]] = {
        "policy step": lambda: policy.train_step(batch, ppo.loss),
        "critic step": lambda: critic.train_step(batch, ValueLoss(0.5)),
        "policy forward": lambda: policy.forward(batch),
        "critic forward": lambda: critic.forward(batch),
        "GAE and whitening": lambda: ppo.advantages(batch, scores, finished_N, Alone()),
    }
    times: dict[str, float] = {}
    for _ in range(3):
        for name, one in work.items():
            times[name] = min(times.get(name, 1e9), timed(mesh, one)[0])
    return {name: round(seconds, 4) for name, seconds in times.items()}, peak_gib(mesh), len(batch.token_ids_T)


def groups_step(
    mesh: Mesh, directory: Path, share: bool, tokens: int, groups: int, prompt: int, response: int
) -> dict[str, Any]:
    """The training step over groups of eight, each prompt computed once or for every sample; how far log-probs are apart."""
    model = build(mesh, directory, "bfloat16", tokens)
    batch = group_batch(groups, 8, prompt, response, model.spec.vocab)
    alone = replace(model._batching, share_prefix=False)
    logprobs = []
    for model._batching in (alone, replace(alone, share_prefix=share)):
        logprobs.append(model.forward(batch)[batch.loss_mask_T])
    gap_S = (logprobs[0] - logprobs[1]).abs()
    forward = min(timed(mesh, lambda: model.forward(batch))[0] for _ in range(2))
    steps = [timed(mesh, lambda: model.train_step(batch, OBJECTIVE.loss)) for _ in range(3)]
    report = steps[0][1]
    return {
        "seconds": round(min(seconds for seconds, _ in steps[1:]), 3),
        "forward_seconds": round(forward, 3),
        "peak_gib": round(peak_gib(mesh), 2),
        "micro_batches": report.micro_batches,
        "tokens": report.tokens,
        "grad_norm": round(report.grad_norm, 5),
        "logprob_gap_mean": float(gap_S.mean()),
        "logprob_gap_max": float(gap_S.max()),
    }


def groups_by_budget(
    mesh: Mesh, directory: Path, budgets: list[int], groups: int, prompt: int, response: int
) -> dict[int, dict[str, Any]]:
    """The training step over groups of eight whose prompt is computed once, by the tokens of a micro-batch."""
    model = build(mesh, directory, "bfloat16", max(budgets))
    batch = group_batch(groups, 8, prompt, response, model.spec.vocab)
    numbers = {}
    for budget in budgets:
        model._batching = replace(model._batching, share_prefix=True, budget=budget)

        def step() -> Any:
            return model.train_step(batch, OBJECTIVE.loss)

        steps = [timed(mesh, step) for _ in range(3)]
        seconds, report = min(seconds for seconds, _ in steps[1:]), steps[-1][1]
        numbers[budget] = {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(report.tokens / seconds),
            "micro_batches": report.micro_batches,
            "kernels_ms": kernels_of(mesh, step),
        }
    return numbers


def experts_layer(mesh: Mesh) -> dict[str, float]:
    """TFLOP/s of forward and backward of a layer's experts."""
    config, experts, x, counts, weights = layer_of_experts(mesh)
    speeds = {}
    for kind, grouped in (("grouped", True), ("sequential", False)):
        config.moe_grouped_gemm = grouped

        def work() -> None:
            output, _ = experts(x, counts, weights)
            output.backward(torch.ones_like(output))

        seconds = min([timed(mesh, work)[0] for _ in range(3)][1:])
        # Gate, up and down, forward and twice backward.
        flops = 3 * 2 * 3 * x.numel() * config.moe_ffn_hidden_size
        speeds[kind] = round(flops / seconds / 1e12, 1)
    return speeds


def offload(mesh: Mesh, directory: Path) -> dict[str, Any]:
    """GiB by part and seconds when a model's state leaves for the host a second time and comes back."""
    settings = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    model = build(mesh, directory, "bfloat16", 4096 if is_large(mesh) else 64, offload=settings)
    model.train_step(random_batch(8, 512 if is_large(mesh) else 24, model.spec.vocab), OBJECTIVE.loss)
    numbers: dict[str, Any] = {}
    for _ in range(2):
        issued: list[float] = []

        def leave(issued: list[float] = issued) -> dict[str, int]:
            begin = time.perf_counter()
            named = model.offload()
            issued.append(time.perf_counter() - begin)
            return named

        away, named = timed(mesh, leave)
        back, _ = timed(mesh, model.onload)
        moved = sum(named.values()) - named.get("gradients", 0)
        numbers = {
            "gib": {name: round(size / 2**30, 2) for name, size in named.items()},
            "call_returned_ms": round(issued[0] * 1e3, 1),
            "away_seconds": round(away, 3),
            "away_gb_per_second": round(moved / away / 1e9, 1),
            "back_seconds": round(back, 3),
            "back_gb_per_second": round(moved / back / 1e9, 1),
        }
    return numbers


# --- parts -----------------------------------------------------------------------------------------------------------


def estimate(
    directory: Path,
    layout: str,
    tokens: int,
    length: int,
    recompute: str = "none",
    others: Mapping[str, Other] | None = None,
) -> Memory:
    parsed = ParallelLayout.parse(layout)
    policy = Sharded(load_spec(directory), parsed, recompute=recompute, tokens_per_micro_batch=tokens)
    return estimate_memory(policy, dtype="bfloat16", engine_sequences=0, max_sequence_tokens=2 * length, others=others)


def steps(part: Part, directory: Path, layouts: list[str], tokens: int, samples: int, length: int) -> None:
    """The training step on each layout, next to what `plan` says about its memory."""
    for layout in layouts:
        numbers = part.measure(layout, layout, training_step, directory, tokens, samples, length)
        if numbers is not None:
            guess = estimate(directory, f"megatron:{layout}", tokens, length)
            part.say(layout, {**numbers, "estimated_gib": round(guess.total / 2**30, 2)})


def dense(part: Part) -> None:
    """Qwen3-0.6B's shape: the training step on every layout that fits."""
    samples, length = (64, 1024) if part.large else (16, 24)
    steps(part, part.model("qwen3_0.6b"), DENSE, 16384 if part.large else 64, samples, length)


def hugging_face(part: Part) -> None:
    """The same step written with transformers."""
    samples, length = (64, 1024) if part.large else (16, 24)
    numbers = part.measure("training step", "d1", transformers_step, part.model("qwen3_0.6b"), samples, length)
    if numbers is not None:
        part.say("training step with transformers", numbers)


def rows(part: Part) -> None:
    """Qwen3-1.7B's shape on one GPU: sequences of one length, with and without recomputation, next to transformers."""
    directory = part.model("qwen3_1.7b")
    rate = part.measure("product", "d1", gemm)
    part.say("product of bfloat16 matrices of 8192 x 8192, TFLOP/s", round(rate or 0))
    long, short, tokens = (4096, 1024, 32768) if part.large else (64, 16, 256)
    for samples, length, recompute in ((8, long, "none"), (64, short, "none"), (8, long, "full")):
        for attention in ("flash-attn-4", "torch"):
            name = f"{samples} x {length}, recomputation {recompute}, attention {attention}"
            numbers = part.measure(name, "d1", row, directory, tokens, samples, length, recompute, attention)
            if numbers is not None:
                share = numbers.get("tflops_per_gpu", 0) / (rate or 1)
                part.say(name, {**numbers, "of_the_product": round(share, 2)})
    for samples, length in ((8, long), (64, short)):
        name = f"{samples} x {length}, transformers"
        numbers = part.measure(name, "d1", transformers_step, directory, samples, length, 0.0)
        if numbers is not None:
            part.say(name, numbers)


def small(part: Part) -> None:
    """SmolLM2-135M's and Qwen3-0.6B's shapes, for which the GPU waits for the host, with either attention."""
    sizes = ((8192, 128, 640), (32768, 128, 640), (32768, 512, 192)) if part.large else ((256, 8, 24),)
    for name in ("smollm2_135m", "qwen3_0.6b"):
        directory = part.model(name)
        for tokens, samples, length in sizes:
            what = f"{name}, {samples} x {length}, micro-batches of {tokens}"
            for attention in ("flash-attn-4", "torch"):
                numbers = part.measure(what, "d1", host_of, directory, tokens, samples, length, attention)
                if numbers is not None:
                    part.say(f"{what}, attention {attention}", numbers)
            numbers = part.measure(name, "d1", transformers_step, directory, samples, length, 0.5, tokens)
            if numbers is not None:
                part.say(f"{what}, transformers", numbers)


def waits(part: Part) -> None:
    """Qwen3-1.7B's shape on one GPU, 8 x 4096 tokens: milliseconds in which the GPU has nothing to do."""
    samples, length, tokens = (8, 4096, 32768) if part.large else (8, 64, 256)
    numbers = part.measure("waits", "d1", waits_of, part.model("qwen3_1.7b"), tokens, samples, length)
    for what, value in (numbers or {}).items():
        part.say(what, value)


def rows_of_four(part: Part) -> None:
    """Qwen3-8B's shape on four GPUs, 32 sequences of 4096 tokens."""
    if part.large and part.gpus < 4:
        return part.say("Qwen3-8B", "needs 4 GPUs")
    directory = part.model("qwen3_8b")
    rate = part.measure("product", "d1", gemm)
    length = 4096 if part.large else 64
    # Micro-batches as large as memory allows.
    for layout, tokens in {"d1t4": 32768, "d2t2": 16384, "d2p2": 16384, "d4": 16384}.items():
        tokens = tokens if part.large else 256
        numbers = part.measure(layout, layout, row, directory, tokens, 32, length, "none", "flash-attn-4")
        if numbers is not None:
            share = numbers.get("tflops_per_gpu", 0) / (rate or 1)
            part.say(f"32 x {length}, {layout}", {**numbers, "of_the_product": round(share, 2)})
    return None


def experts_model(part: Part) -> None:
    """Qwen3-30B-A3B with 8 of its 48 layers: the training step on two and four GPUs, with the rate of a product."""
    directory = part.model("qwen3_30b_a3b")
    rate = part.measure("product", "d1", gemm)
    part.say("product of bfloat16 matrices, TFLOP/s", round(rate or 0))
    tokens, samples, length = (16384, 64, 2048) if part.large else (64, 8, 24)
    for layout in ("d2e2", "d4e4"):
        what = f"{samples} x {length}, {layout}, by kernels"
        numbers = part.measure(what, layout, row, directory, tokens, samples, length, "none", "flash-attn-4")
        if numbers is not None:
            share = numbers.get("tflops_per_gpu", 0) / (rate or 1)
            part.say(what, {**numbers, "of_the_product": round(share, 2)})
    waiting = part.measure("waits on d2e2", "d2e2", waits_of, directory, tokens, samples, length)
    for what, value in (waiting or {}).items():
        part.say(f"d2e2, {what}", value)
    steps(part, directory, EXPERTS, tokens, samples, length)
    for line in estimate(directory, "megatron:d1", tokens, length).table():
        part.say("one GPU would need", line)


def long(part: Part) -> None:
    """Qwen3-1.7B's shape, one update at 32k and at 128k tokens a sequence: c2 with full recomputation, next to c1."""
    directory = part.model("qwen3_1.7b")
    memory = part.measure("memory", "d1", memory_of_device)
    # The CPU's products are in bfloat16 only where it has such instructions, and its losses are compared more closely.
    sizes, dtype, bound = (
        (((32768, 4), (131072, 1)), "bfloat16", ROUNDED) if part.large else (((256, 2), (1024, 1)), "float32", 1e-5)
    )
    for length, samples in sizes:
        numbers_of: dict[str, dict[str, float]] = {}
        for layout in ("c2", "d1"):
            what = f"{samples} x {length}, {'c1' if layout == 'd1' else layout}"
            guess = estimate(directory, f"megatron:{layout}", length, length, "full").total / 2**30
            if guess > 0.95 * (memory or 0):
                part.say(what, f"not measured: it needs {guess:.0f} GiB, and the device has {memory or 0:.0f}")
                continue
            numbers = part.measure(what, layout, long_step, directory, length, samples, dtype)
            if numbers is not None:
                numbers_of[layout] = numbers
                part.say(what, {**numbers, "estimated_gib": round(guess, 2)})
                near = abs(numbers["peak_gib"] / guess - 1) < 0.15
                if part.large:
                    part.claim(f"{what}: memory is as estimated", near, round(guess, 2))
        cut, whole = numbers_of.get("c2"), numbers_of.get("d1")
        if cut is not None and whole is not None:
            apart = {name: abs(cut[name] / whole[name] - 1) for name in ("loss", "grad_norm")}
            what = f"{samples} x {length}: c2 computes the update of c1, relative differences"
            part.claim(what, max(apart.values()) < bound, apart)


def critic(part: Part) -> None:
    """Qwen3-1.7B as policy and as critic on one GPU: times, and memory against the estimate."""
    directory, other = part.model("qwen3_1.7b"), part.model("qwen3_1.7b", write_classifier)
    tokens, samples, length = (16384, 32, 2048) if part.large else (64, 4, 24)
    results = part.measure("policy and critic", "d1", policy_and_critic, directory, other, tokens, samples, length)
    if results is None:
        return
    times, peak, count = results
    for what, seconds in times.items():
        part.say(what, {"seconds": seconds, "tokens_per_second": round(count / max(seconds, 1e-9))})
    # It has no vocabulary to compute.
    ratio = times["critic step"] / times["policy step"]
    part.claim("the critic's step costs no more than the policy's", ratio < 1.02 or not part.large, round(ratio, 2))
    sharded = Sharded(load_spec(other, value_head=True), ParallelLayout(), tokens_per_micro_batch=tokens)
    others = {"critic": Other(sharded, learns=True)}
    guess = estimate(directory, "megatron:d1", tokens, 2 * length, others=others).total / 2**30
    near = abs(peak / guess - 1) < 0.15
    part.claim(
        "memory is as estimated", near or not part.large, {"peak_gib": round(peak, 1), "estimated_gib": round(guess, 1)}
    )


def experts(part: Part) -> None:
    """The experts of one layer of Qwen3-30B-A3B, 65,536 tokens: one kernel for all, one product an expert."""
    speeds = part.measure("experts", "d1", experts_layer)
    if speeds is not None:
        part.say("experts, TFLOP/s", speeds)


def shared_prefix(part: Part) -> None:
    """Groups of eight samples with 1,024 tokens of prompt and about as many of response: `policy.share_prefix`."""
    sizes = (32768, 8, 1024, 1024) if part.large else (512, 4, 24, 24)
    for name in ("qwen3_0.6b", "qwen3_1.7b"):
        numbers_of: dict[bool, dict[str, Any]] = {}
        for share in (False, True):
            what = f"{name}, prompts {'once' if share else 'for every sample'}"
            numbers = part.measure(what, "d1", groups_step, part.model(name), share, *sizes)
            if numbers is not None:
                numbers_of[share] = numbers
                part.say(what, numbers)
        if len(numbers_of) < 2:
            continue
        alone, shared = numbers_of[False], numbers_of[True]
        part.say(f"{name}, share of tokens saved", round(1 - shared["tokens"] / alone["tokens"], 3))
        times = round(alone["seconds"] / shared["seconds"], 2)
        part.claim("it pays to compute a prompt once", times > 1.2 or not part.large, times)
        # Both are off by bfloat16's rounding.
        gap = shared["logprob_gap_mean"]
        part.claim("log-probs are those of samples alone", gap < 2e-2, gap)


def groups(part: Part) -> None:
    """Qwen3-1.7B's shape, 32 groups of eight with 98 tokens of prompt and about 512 of response, by size of micro-batches.

    A group has about 4,200 tokens with its prompt once, so a micro-batch of 8,192 takes one.
    """
    budgets, sizes = ([8192, 8704, 16384, 32768], (32, 98, 512)) if part.large else ([128, 256], (4, 8, 12))
    numbers = part.measure("groups", "d1", groups_by_budget, part.model("qwen3_1.7b"), budgets, *sizes)
    for budget, row_of in (numbers or {}).items():
        part.say(f"micro-batches of {budget} tokens", row_of)


def leaving(part: Part) -> None:
    """Parameters, gradients and optimizer state of two models to the host and back."""
    for name in ("qwen3_moe", "qwen3_1.7b"):
        numbers = part.measure(f"offload {name}", "d1", offload, part.model(name))
        if numbers is not None:
            part.say(f"offload {name}", numbers)


def deterministic(part: Part) -> None:
    """What `trainer.deterministic` costs on two replicas."""
    for name in ("qwen3", "qwen3_moe"):
        directory = part.model(name)
        results = [part.measure(f"{name}, deterministic {on}", "d2", same_bits, directory, on) for on in (True, False)]
        if None not in results:
            (same, seconds), (same_without, without) = results
            part.say(
                f"{name}, deterministic",
                {"seconds": round(seconds, 3), "without": round(without, 3), "times": round(seconds / without, 2),
                 "same_bits": same, "same_bits_without": same_without},
            )  # fmt: skip


PARTS: dict[str, Callable[[Part], None]] = {
    "rows": rows, "rows-four": rows_of_four, "waits": waits, "small": small,
    "dense": dense, "transformers": hugging_face, "experts-model": experts_model, "long": long, "critic": critic,
    "experts": experts, "shared-prefix": shared_prefix, "groups": groups, "offload": leaving, "deterministic": deterministic,
}  # fmt: skip


if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import training_speed

    sys.exit(run(training_speed.__doc__, training_speed.PARTS))
