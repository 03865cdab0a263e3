"""What `fivefold plan` says of runs that were recorded, next to what was measured: memory, times, and which layout is best.

`python benchmarks/plan_accuracy.py [--calibration FILE]`; no GPU and no torch. A new measurement is a new row of `UPDATES`,
`ROLLOUTS` or `SYNCS`. No row has a figure of its own: rates are by kind of kernel and size (src/fivefold/plan/measured.py),
some were set by these same rows, which `source` there says. Rows and rates are of the same kernels: where the rates are
measured again with other ones, rows of the older ones go.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fivefold.config import RunConfig
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.families import spec_from_config
from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies, load_rates
from fivefold.plan.estimate import Lengths, step_estimate
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED
from fivefold.plan.memory import Sharded, estimate_memory
from fivefold.plan.rollout_time import Requests, Sampler, rollout_time
from fivefold.plan.search import Space
from fivefold.plan.step_time import Batch, forward_time, update_time
from tests.support.public_shapes import SHAPES

GPU, BUDGET = "h200-141g", 16384
STEP_BOUND, MEMORY_BOUND = 0.15, 0.08
X1, X2, X4 = (f"results/h200-x{name}.txt" for name in ("1", "2", "4-experts"))
METHODS, ENGINES = "results/h200-x4-methods.txt", "results/h200-x4-engines.txt"
NOTES = "notes of commit 1013577"
"""Measured before results were kept here; how many micro-batches they had was not noted."""

MODELS: dict[str, dict[str, Any]] = {
    "0.6B": SHAPES["Qwen3-0.6B"],
    # As the benchmarks make it, so that a critic next to it has the same body.
    "1.7B": SHAPES["Qwen3-1.7B"] | {"tie_word_embeddings": False},
    "8B": SHAPES["Qwen3-8B"],
    "30B-A3B, 8 layers": SHAPES["Qwen3-30B-A3B"] | {"num_hidden_layers": 8},
}


@dataclass(frozen=True)
class Update:
    """One optimizer step that was timed, with random lengths around their mean."""

    model: str
    layout: str
    tokens: int
    samples: int
    seconds: float | None
    gib: float | None
    """Peak of the fullest rank."""
    source: str
    micro_batches: int | None = None
    recompute: str = "none"
    predicted: float = 0.75
    """Share of the tokens that are in a response."""
    pipeline: tuple[tuple[str, int], ...] = ()
    value_head: bool = False
    backward: bool = True
    budget: int = BUDGET
    """`tokens_per_micro_batch`."""
    spread: float = 0.5
    """Share of the mean by which lengths differ from it at most."""


UPDATES = [
    Update("0.6B", "d1", 67543, 64, 1.154, 31.88, X1, 5),
    Update("0.6B", "t2", 67543, 64, 1.156, 16.56, X2, 5),
    Update("0.6B", "p2", 67543, 64, 1.140, 26.77, X2, 5),
    Update("0.6B", "d2", 67543, 64, 0.719, 25.22, X2, 3),
    Update("30B-A3B, 8 layers", "d2t2e4", 135114, 64, 1.037, 35.84, X4, 5),
    Update("30B-A3B, 8 layers", "d4e4", 135114, 64, 1.018, 44.16, X4, 3),
    Update("30B-A3B, 8 layers", "t4e4", 135114, 64, 1.210, 30.37, X4, 9),
    Update("30B-A3B, 8 layers", "c2t2e4", 135114, 64, 1.326, 32.70, X4, 9),
    Update("1.7B", "d1", 67500, 32, 2.202, None, METHODS),
    Update("1.7B", "d1", 67500, 32, 1.671, None, METHODS, value_head=True),
    Update("1.7B", "d1", 67500, 32, 0.676, None, METHODS, backward=False),
    Update("1.7B", "d1", 67500, 32, 0.541, None, METHODS, value_head=True, backward=False),
    Update("1.7B", "d1", 32768, 8, 1.143, 67.0, NOTES, spread=0),
    Update("1.7B", "d1", 65536, 64, 2.070, None, NOTES, spread=0),
    Update("1.7B", "d1", 32768, 8, 1.380, None, NOTES, recompute="full", spread=0),
    Update("8B", "t4", 131072, 32, 4.250, 59.0, NOTES, spread=0),
    Update("8B", "d2t2", 131072, 32, 3.850, 93.0, NOTES, spread=0),
]


@dataclass(frozen=True)
class Rollout:
    """256 requests, 8 to a prompt, that vLLM answered."""

    model: str
    tp: int
    prompt: int
    response: float
    longest: int
    tokens_per_second: int
    is_server: bool = False
    source: str = ENGINES


TAIL = 541.8
"""Mean of the benchmark's long tail, of which one response reaches 4096."""
ROLLOUTS = [
    Rollout("1.7B", 1, 128, 256, 256, 38524),
    Rollout("1.7B", 1, 512, 1024, 1024, 25876),
    Rollout("1.7B", 1, 128, TAIL, 4096, 10772),
    Rollout("1.7B", 1, 128, 256, 256, 32064, True),
    Rollout("1.7B", 1, 512, 1024, 1024, 25076, True),
    Rollout("1.7B", 1, 128, TAIL, 4096, 10900, True),
    Rollout("8B", 2, 128, 256, 256, 30516),
    Rollout("8B", 2, 512, 1024, 1024, 23366),
    Rollout("8B", 2, 128, TAIL, 4096, 7049),
    Rollout("8B", 2, 128, 256, 256, 28284, True),
    Rollout("8B", 2, 512, 1024, 1024, 22977, True),
]


class Tally:
    """Rows within a bound."""

    def __init__(self, what: str, bound: float) -> None:
        self._what, self._bound, self.errors = what, bound, list[float]()

    def compare(self, predicted: float, measured: float) -> str:
        """The difference as a share, marked where it is beyond the bound."""
        error = predicted / measured - 1
        self.errors.append(error)
        return f"{error:+7.1%}{' ' if abs(error) <= self._bound else '!'}"

    def say(self) -> None:
        within = sum(abs(error) <= self._bound for error in self.errors)
        mean = sum(map(abs, self.errors)) / len(self.errors)
        print(f"{self._what}: {within} of {len(self.errors)} within {self._bound:.0%}, {mean:.1%} away on average")


def spec_of(model: str, value_head: bool = False) -> ModelSpec:
    spec = spec_from_config(MODELS[model])
    return replace(spec, value_head=True, tied=False) if value_head else spec


def sharded(row: Update) -> tuple[Sharded, Batch, Cluster]:
    layout = ParallelLayout.parse(f"megatron:{row.layout}")
    mean = row.tokens / row.samples
    model = Sharded(
        spec_of(row.model, row.value_head), layout, PipelineSplit.of(dict(row.pipeline)), row.recompute, row.budget
    )
    return model, Batch(row.tokens, mean, mean * (1 + row.spread**2 / 3), row.predicted), Cluster(GPU, layout.world_size)


def updates(rates: Efficiencies) -> Iterator[Tally]:
    times, sizes = Tally("step time", STEP_BOUND), Tally("memory", MEMORY_BOUND)
    print(f"{'update':<42}{'seconds':>9}{'predicted':>11}{'':>9}{'GiB':>8}{'predicted':>11}{'':>9}  source")
    for row in UPDATES:
        model, batch, cluster = sharded(row)
        ask = update_time if row.backward else forward_time
        found = ask(model, batch, cluster, rates, 1.0)
        if row.micro_batches not in (None, found.micro_batches):
            print(f"    {row.micro_batches} micro-batches were recorded, {found.micro_batches} are expected")
        what = f"{row.model} {row.layout}" + (" full recomputation" if row.recompute == "full" else "")
        what += (", critic" if row.value_head else "") + ("" if row.backward else ", forward")
        line = f"{what:<42}"
        if row.seconds is not None:
            line += f"{row.seconds:>9.3f}{found.total:>11.3f}{times.compare(found.total, row.seconds):>9}"
        if row.gib is not None:
            # What the micro-batches really held, which is less than the budget.
            held = replace(model, tokens_per_micro_batch=int(found.micro_batch_tokens))
            gib = estimate_memory(held, dtype="bfloat16", engine_sequences=0, max_sequence_tokens=1).total / 2**30
            line += f"{row.gib:>8.2f}{gib:>11.2f}{sizes.compare(gib, row.gib):>9}"
        else:
            line += " " * 28
        print(f"{line}  {row.source}")
    yield from (times, sizes)


def rollouts(rates: Efficiencies) -> Iterator[Tally]:
    tally = Tally("rollout tokens a second", STEP_BOUND)
    print(f"\n{'rollout':<42}{'tokens/s':>10}{'predicted':>11}")
    for row in ROLLOUTS:
        spec = spec_of(row.model)
        # 60 % of the memory, as the benchmark gives.
        cache = 0.6 * Cluster(GPU, 1).bytes - 2 * spec.parameters / row.tp
        sampler = Sampler(spec, row.tp, 1, 256, cache, is_server=row.is_server)
        found = rollout_time(sampler, Requests(256, 8, row.prompt, row.response, row.longest), 1, rates)
        rate = found.tokens / found.total
        what = f"{row.model} t{row.tp}, {row.prompt} + {row.response:.0f} of {row.longest}" + (", server" * row.is_server)
        print(f"{what:<42}{row.tokens_per_second:>10,}{rate:>11,.0f}{tally.compare(rate, row.tokens_per_second):>9}")
    yield tally


def whole_step(rates: Efficiencies) -> Iterator[Tally]:
    """A GRPO step from the command line: 256 responses of 1024 tokens, everything offloaded (h200-x4-engines.txt)."""
    tally = Tally("parts of a whole step", STEP_BOUND)
    config = RunConfig.of(
        model={"path": "here"},
        policy={"tokens_per_micro_batch": BUDGET, "offload": {"parameters": True, "gradients": True, "optimizer": True}},
        engine={"backend": "vllm:d1", "memory_fraction": 0.5},
        algorithm={"group_size": 8, "kl": {"coef": 0}},
        data={"train": ["x"], "prompts_per_step": 32, "max_prompt_tokens": 64, "max_response_tokens": 1024},
        launch={"gpu": GPU},
    )
    found = step_estimate(config, spec_of("1.7B"), Cluster(GPU, 1), rates, Lengths(7, 1024))
    parts = {"rollout": found.parts["rollout"]}
    moved = found.parts["offload"]
    parts["training, state back from the host"] = (
        sum(seconds for name, seconds in found.parts.items() if name not in ("rollout", "weight sync", "offload"))
        + moved / 2
    )
    parts["weight sync, state to the host"] = found.parts["weight sync"] + moved / 2
    parts["step"] = found.seconds
    print(f"\n{'whole GRPO step, 1.7B, one GPU':<42}{'seconds':>9}{'predicted':>11}")
    measured = {"rollout": 8.181, "training, state back from the host": 9.612, "step": 18.904}
    measured["weight sync, state to the host"] = 0.926
    for name, seconds in parts.items():
        print(f"{name:<42}{measured[name]:>9.3f}{seconds:>11.3f}{tally.compare(seconds, measured[name]):>9}")
    yield tally


def ranks(rates: Efficiencies) -> None:
    """The place that is predicted for the layout that was measured best: among those measured, and among all that fit."""
    print("\nlayouts by predicted time, the measured best first")
    groups: dict[tuple[str, int], list[Update]] = {}
    for row in UPDATES:
        if row.seconds is not None and row.backward and not row.value_head and row.recompute == "none":
            world = ParallelLayout.parse(f"megatron:{row.layout}").world_size
            groups.setdefault((row.model, world), []).append(row)
    for (name, world), rows in groups.items():
        if world == 1 or len(rows) < 2:
            continue
        best = min(rows, key=lambda row: row.seconds or 0.0)
        model, batch, cluster = sharded(best)
        data = {"train": ["x"], "prompts_per_step": best.samples // 2}
        base = RunConfig.of(model={"path": "here"}, data=data, algorithm={"group_size": 2})
        timed = []
        for layout, split in Space(model.spec, base, cluster, rates, Lengths(256, 256)).layouts(world):
            other = replace(model, layout=layout, stages=split)
            if max(sum(vars(held).values()) for held in other.held(2)) <= cluster.bytes:
                timed.append((update_time(other, batch, cluster, rates, 1.0).total, str(layout)))
        order = [layout for _, layout in sorted(timed)]
        among = [layout for layout in order if layout in {f"{sharded(row)[0].layout}" for row in rows}]
        own = str(model.layout)
        first = ", ".join(one.removeprefix("megatron:") for one in order[:3])
        print(
            f"{name}, {world} GPUs: {best.layout} is number {among.index(own) + 1} of the {len(among)} measured and "
            f"{order.index(own) + 1} of the {len(order)} that fit (first {first})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path, help="rates of `fivefold plan --calibrate` instead of those that came")
    calibration = parser.parse_args().calibration
    rates = Efficiencies(MEASURED if calibration is None else load_rates(calibration), GPU)
    tallies = [*updates(rates), *rollouts(rates), *whole_step(rates)]
    ranks(rates)
    print()
    for tally in tallies:
        tally.say()


if __name__ == "__main__":
    main()
