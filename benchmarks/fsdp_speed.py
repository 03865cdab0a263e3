"""Measure how fast `fsdp:` layouts train, next to transformers and Megatron-Core; on a CPU with tiny models, to try the
script.

`python benchmarks/fsdp_speed.py [PART ...] [--seconds N]`: what a part measures is printed as it comes; the exit code is 1
where something failed, or is slower or larger than it should be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks.harness import Part, peak_gib, run
from benchmarks.training_speed import training_step, transformers_step
from fivefold.commands.probes import driver
from fivefold.config.learners import OptimizerConfig, PolicyConfig
from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec
from fivefold.plan.memory import Sharded, estimate_memory
from tests.support.gpu_models import build, random_batch, timed
from tests.support.shards import shard_of_replica
from tests.support.two_steps import OBJECTIVE

if TYPE_CHECKING:
    from fivefold.fsdp.mesh import Mesh as FSDPMesh
    from fivefold.fsdp.model import FSDPModel
    from fivefold.megatron.mesh import Mesh

FASTER, SHARE, MARGIN, STREAM_SECONDS = 1.25, 0.8, 0.1, 1.0
"""Lowest speed relative to transformers on one GPU and to Megatron-Core on two, largest error of the memory estimate, and
longest time in seconds to stream 8B parameters."""


def fsdp_model(mesh: FSDPMesh, directory: Path, tokens: int, **options: Any) -> FSDPModel:
    from fivefold.fsdp.model import FSDPModel

    policy = PolicyConfig(dtype="bfloat16", tokens_per_micro_batch=tokens, optimizer=OptimizerConfig(lr=1e-5), **options)
    return FSDPModel(directory, policy, mesh, total_updates=100)


def fsdp_step(
    mesh: FSDPMesh, directory: Path, tokens: int, samples: int, length: int, recompute: str = "none"
) -> dict[str, float]:
    """Return the steady time of a training step on `fsdp:`, tokens per second and peak memory."""
    model = fsdp_model(mesh, directory, tokens, recompute=recompute)
    mine = random_batch(samples, length, model.spec.vocab).select(shard_of_replica(mesh.ranks, range(samples)))
    timings = [timed(mesh, lambda: model.train_step(mine, OBJECTIVE.loss)) for _ in range(4)]
    seconds, report = min(seconds for seconds, _ in timings[1:]), timings[-1][1]
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(report.tokens / seconds),
        "peak_gib": round(peak_gib(mesh), 2),
        "micro_batch_tokens": round(report.tokens / mesh.layout.dp / report.micro_batches),
    }


def megatron_step(mesh: Mesh, directory: Path, tokens: int, samples: int, length: int) -> dict[str, float]:
    """Return the steady time of a training step on Megatron-Core with whole layers recomputed, tokens per second and peak
    memory."""
    model = build(mesh, directory, "bfloat16", tokens, recompute="full")
    mine = random_batch(samples, length, model.spec.vocab).select(shard_of_replica(mesh.ranks, range(samples)))
    timings = [timed(mesh, lambda: model.train_step(mine, OBJECTIVE.loss)) for _ in range(4)]
    seconds, report = min(seconds for seconds, _ in timings[1:]), timings[-1][1]
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(report.tokens / seconds),
        "peak_gib": round(peak_gib(mesh), 2),
    }


def stream(mesh: FSDPMesh, directory: Path) -> dict[str, float]:
    """Return the seconds in which every rank receives all weights as full tensors."""
    model = fsdp_model(mesh, directory, 1024)
    seconds = min(timed(mesh, lambda: sum(tensor.numel() for _, tensor in model.weights()))[0] for _ in range(3))
    return {"seconds": round(seconds, 3)}


def estimated_gib(directory: Path, layout: str, tokens: int, recompute: str) -> float:
    model = Sharded(load_spec(directory), ParallelLayout.parse(layout), recompute=recompute, tokens_per_micro_batch=tokens)
    memory = estimate_memory(model, dtype="bfloat16", engine_sequences=0, max_sequence_tokens=0)
    return round(sum(memory.training.values()) / 2**30, 2)


def one(part: Part) -> None:
    """Compare a step of Qwen3-1.7B's shape with transformers: one GPU, 8 x 4096 tokens."""
    samples, length, tokens = (8, 4096, 16384) if part.large else (8, 24, 64)
    if part.large and driver()["gpus"][0]["memory_gib"] < 100:
        # Micro-batches of 16,384 tokens do not fit into 80 GB.
        tokens = 8192
    directory = part.model("qwen3_1.7b")
    theirs = part.measure("transformers", "d1", transformers_step, directory, samples, length)
    ours = part.measure("fsdp:d1", "fsdp:d1", fsdp_step, directory, tokens, samples, length)
    part.say("transformers", theirs)
    part.say("fsdp:d1", ours)
    part.say("megatron:d1", part.measure("megatron:d1", "d1", training_step, directory, tokens, samples, length))
    if part.large and ours and theirs:
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        part.claim(f"at least {FASTER} times transformers", ratio >= FASTER, round(ratio, 2))
        fits(part, directory, "fsdp:d1", "none", ours)


def two(part: Part) -> None:
    """Compare a step of Qwen3-8B's shape with Megatron-Core: two GPUs, 16 x 4096 tokens, recomputation."""
    samples, length, tokens = (16, 4096, 16384) if part.large else (8, 24, 64)
    directory = part.model("qwen3_8b")
    ours = part.measure("fsdp:d2", "fsdp:d2", fsdp_step, directory, tokens, samples, length, "full")
    part.say("fsdp:d2", ours)
    theirs = [part.measure(layout, layout, megatron_step, directory, tokens, samples, length) for layout in ("d2", "t2")]
    part.say("megatron:d2 and megatron:t2", theirs)
    if part.large and ours and any(theirs):
        share = ours["tokens_per_second"] / max(numbers["tokens_per_second"] for numbers in theirs if numbers)
        part.claim(f"at least {SHARE} of Megatron-Core", share >= SHARE, round(share, 2))
        fits(part, directory, "fsdp:d2", "full", ours)


def weights(part: Part) -> None:
    """Measure how fast all weights of Qwen3-8B's shape are streamed from two GPUs."""
    numbers = part.measure("weights of fsdp:d2", "fsdp:d2", stream, part.model("qwen3_8b"))
    part.say("weights of fsdp:d2", numbers)
    if part.large and numbers:
        part.claim(f"at most {STREAM_SECONDS} s", numbers["seconds"] <= STREAM_SECONDS, numbers["seconds"])


def largest(part: Part) -> None:
    """Train Qwen3-14B's shape on two GPUs: 2,048 tokens a sequence, recomputation."""
    samples, length, tokens = (8, 2048, 4096) if part.large else (8, 24, 64)
    numbers = part.measure("fsdp:d2", "fsdp:d2", fsdp_step, part.model("qwen3_14b"), tokens, samples, length, "full")
    part.say("fsdp:d2", numbers)


def fits(part: Part, directory: Path, layout: str, recompute: str, numbers: dict[str, float]) -> None:
    """Compare the peak with the estimate for micro-batches as full as they were: samples do not fill a budget exactly."""
    peak, guess = numbers["peak_gib"], estimated_gib(directory, layout, int(numbers["micro_batch_tokens"]), recompute)
    part.claim(
        f"memory within {MARGIN:.0%} of the estimate", abs(peak - guess) <= MARGIN * peak, {"peak": peak, "estimate": guess}
    )


PARTS = {"one": one, "two": two, "weights": weights, "largest": largest}


if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import fsdp_speed

    sys.exit(run(fsdp_speed.__doc__, fsdp_speed.PARTS))
