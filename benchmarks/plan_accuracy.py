"""What `fivefold plan` says of runs that were recorded, next to what was measured: memory, times, and which layout is best.

`python benchmarks/plan_accuracy.py [--calibration FILE]`; no GPU and no torch. A new measurement is a new row of `UPDATES`,
`ROLLOUTS` or `SYNCS`. No row has a figure of its own: rates are by kind of kernel and size (src/fivefold/plan/measured.py),
some were set by these same rows, which `source` there says. Rows and rates are of the same kernels: where the rates are
measured again with other ones, rows of the older ones go.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fivefold.config import RunConfig
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.families import spec_from_config
from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies, load_rates
from fivefold.plan.estimate import Lengths, step_estimate
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED, Rate
from fivefold.plan.memory import LOGITS_BYTES, Sharded, estimate_memory
from fivefold.plan.rollout_time import Requests, Sampler, rollout_time
from fivefold.plan.search import Space
from fivefold.plan.step_time import Batch, update_time
from tests.support.layout_cases import with_backend
from tests.support.public_shapes import SHAPES

GPU, BUDGET = "h200-141g", 16384
STEP_BOUND, MEMORY_BOUND = 0.15, 0.08

MODELS: dict[str, dict[str, Any]] = {
    "135M": SHAPES["SmolLM2-135M-Instruct"],
    "0.6B": SHAPES["Qwen3-0.6B"],
    # As the benchmarks make it, so that a critic next to it has the same body.
    "1.7B": SHAPES["Qwen3-1.7B"] | {"tie_word_embeddings": False},
    "8B": SHAPES["Qwen3-8B"],
    "30B-A3B, 8 layers": SHAPES["Qwen3-30B-A3B"] | {"num_hidden_layers": 8},
}


@dataclass(frozen=True)
class Update:
    """One optimizer step that was timed, with random lengths around their mean (h200-step.txt and h200-long.txt)."""

    model: str
    layout: str
    tokens: int
    samples: int
    seconds: float
    gib: float
    """Peak of the fullest rank."""
    micro_batches: int
    recompute: str = "none"
    predicted: float = 0.75
    """Share of the tokens that are in a response."""
    pipeline: tuple[tuple[str, int], ...] = ()
    budget: int = BUDGET
    """`tokens_per_micro_batch`."""
    spread: float = 0.5
    """Share of the mean by which lengths differ from it at most."""
    has_flash: bool = True
    """Attention is that of flash-attn-4."""
    older_head: bool = False
    """The head had a second chunk of logits, or the gradient of one, at the peak, as it has no longer."""


ROWS: dict[str, Any] = {"budget": 32768, "spread": 0}
"""Tokens of a micro-batch and sequences of one length, as benchmarks/training_speed.py has them in `rows`."""

OLDER: dict[str, Any] = {"older_head": True}

UPDATES = [
    Update("0.6B", "d1", 67543, 64, 0.656, 31.16, 5, **OLDER),
    Update("0.6B", "t2", 67543, 64, 0.627, 16.65, 5, **OLDER),
    Update("0.6B", "p2", 67543, 64, 0.465, 23.65, 5, **OLDER),
    Update("0.6B", "d2", 67543, 64, 0.349, 25.02, 3, **OLDER),
    # benchmarks/results/h200-x2-experts.txt
    Update("30B-A3B, 8 layers", "d2e2", 131072, 64, 0.848, 67.98, 4, spread=0),
    Update("30B-A3B, 8 layers", "d2e2", 135114, 64, 0.914, 65.70, 5),
    Update("30B-A3B, 8 layers", "t2e2", 135114, 64, 1.112, 57.53, 9),
    Update("30B-A3B, 8 layers", "c2e2", 135114, 64, 1.255, 58.76, 9),
    Update("1.7B", "d1", 32768, 8, 0.7079, 99.70, 1, **ROWS),
    Update("1.7B", "d1", 32768, 8, 0.8005, 103.17, 1, **ROWS, has_flash=False),
    Update("1.7B", "d1", 65536, 64, 1.2839, 99.80, 2, **ROWS),
    Update("1.7B", "d1", 65536, 64, 1.3500, 103.30, 2, **ROWS, has_flash=False),
    Update("1.7B", "d1", 32768, 8, 0.8622, 40.94, 1, **ROWS, recompute="full"),
    Update("1.7B", "d1", 32768, 8, 0.9943, 41.06, 1, **ROWS, recompute="full", has_flash=False),
    Update("8B", "d2t2", 131072, 32, 3.151, 86.86, 4, spread=0),
    Update("8B", "d1t4", 131072, 32, 3.4485, 75.53, 4, **ROWS),
    # benchmarks/results/h200-fsdp.txt
    Update("8B", "d2", 66483, 16, 3.627, 99.32, 3, recompute="full", **OLDER),
    Update("8B", "fsdp:d2", 66483, 16, 4.13, 76.40, 3, recompute="full"),
    Update("1.7B", "fsdp:d1", 33400, 8, 0.986, 60.6, 3),
    Update("1.7B", "fsdp:d1", 33400, 8, 1.98, 49.9, 6, budget=8192),
    Update("1.7B", "d1", 131072, 4, 6.596, 42.07, 4, **ROWS, **OLDER, recompute="full"),
    Update("1.7B", "d1", 131072, 1, 17.339, 60.89, 1, budget=131072, spread=0, recompute="full"),
    Update("1.7B", "c2", 131072, 4, 3.76, 28.73, 4, **ROWS, **OLDER, recompute="full"),
    Update("1.7B", "c2", 131072, 1, 9.086, 36.56, 1, budget=131072, spread=0, recompute="full"),
]


@dataclass(frozen=True)
class Rollout:
    """Requests that vLLM answered: 256, 8 to a prompt (benchmarks/results/h200-x4-engines.txt), if nothing else is said."""

    model: str
    tp: int
    prompt: int
    response: float
    longest: int
    tokens_per_second: int
    is_server: bool = False
    count: int = 256
    group: int = 8
    processes: int = 1
    logprobs: Literal["none", "collected", "objects"] = "collected"
    at_most: int = 0
    """Highest of several measurements, of which `tokens_per_second` is the lowest; 0 if there was one."""
    bound: float = STEP_BOUND
    """Largest difference to the prediction, as a share of what was measured."""

    @property
    def name(self) -> str:
        text = f"{self.model} t{self.tp}, {self.prompt} + {self.response:.0f} of {self.longest}"
        text += ", server" * self.is_server + f", {self.count} at once" * (self.count != 256)
        text += f" by {self.processes}" * (self.processes > 1)
        return text + {"none": ", no log-probs", "collected": "", "objects": ", objects"}[self.logprobs]

    def predicted(self, rates: Efficiencies) -> float:
        """Tokens a second; the engine has 60 % of the memory, as the benchmarks give it."""
        spec = spec_of(self.model)
        cache = 0.6 * Cluster(GPU, 1).bytes - 2 * spec.parameters / self.tp
        sampler = Sampler(
            spec, self.tp, 1, self.count, cache, is_server=self.is_server, processes=self.processes, logprobs=self.logprobs
        )
        requests = Requests(self.count, self.group, self.prompt, self.response, self.longest)
        estimate = rollout_time(sampler, requests, 1, rates)
        return estimate.tokens / estimate.total

    def measured(self, predicted: float) -> float:
        """The measured rate that is nearest to the predicted one."""
        return min(max(predicted, self.tokens_per_second), max(self.at_most, self.tokens_per_second))


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


def alone(model: str, count: int, rate: int, logprobs: Literal["none", "objects"], **more: Any) -> Rollout:
    """Requests to vLLM alone, each with a prompt of its own (benchmarks/results/h200-engine-limit.txt)."""
    return Rollout(model, 1, 100, 200, 200, rate, count=count, group=1, logprobs=logprobs, **more)


OTHER_HOST = {"bound": 1 / 3}
"""The other rows of the table are of another host, and hosts differ by a third."""
FASTER_HOST = 0.6
"""Bound where a host took less than half as long for its part of a step of 1,024 sequences."""
ROLLOUTS += [
    alone("135M", 256, 47500, "none", at_most=48400),
    alone("135M", 256, 25000, "objects", at_most=27100),
    alone("135M", 1024, 31000, "none", at_most=32900),
    alone("135M", 1024, 23400, "objects"),
    alone("135M", 1024, 73000, "none", at_most=93000, processes=2),
    alone("135M", 1024, 52000, "objects", at_most=55000, processes=2),
    alone("1.7B", 256, 38500, "none"),
    alone("1.7B", 256, 22000, "objects"),
    alone("1.7B", 1024, 42600, "none", **OTHER_HOST),
    alone("1.7B", 1024, 25300, "objects", at_most=29800, **OTHER_HOST),
]


def elsewhere(model: str, count: int, rate: int, **more: Any) -> Rollout:
    """Requests with eight responses to each prompt, on two more hosts (benchmarks/results/h200-engine-limit.txt)."""
    return Rollout(model, 1, 100, 200, 200, rate, count=count, **{"group": 8, **OTHER_HOST, **more})


ROLLOUTS += [
    elsewhere("135M", 256, 60781, logprobs="none", processes=2),
    elsewhere("135M", 256, 37141),
    elsewhere("135M", 1024, 65569, logprobs="none", processes=2),
    elsewhere("135M", 1024, 64559, logprobs="objects", processes=2),
    elsewhere("1.7B", 256, 34460),
    elsewhere("1.7B", 1024, 49007, logprobs="none", processes=2),
    elsewhere("1.7B", 1024, 44524, logprobs="objects", processes=2),
    elsewhere("1.7B", 1024, 38731),
    elsewhere("1.7B", 1024, 43493, is_server=True, processes=2),
    # The same on a fourth host.
    elsewhere("135M", 256, 48579, is_server=True, processes=2),
    elsewhere("135M", 1024, 57574, is_server=True, processes=2),
    # Four processes take turns on the GPU, and one process takes all their answers: the estimate counts neither.
    elsewhere("135M", 1024, 92231, is_server=True, processes=4, bound=0.45),
    elsewhere("135M", 256, 42962),
    elsewhere("135M", 1024, 41503),
]


def faster(model: str, count: int, rate: int, **more: Any) -> Rollout:
    """The same with tokens drawn in one launch, on a host that is up to 2.5 times as fast."""
    return elsewhere(model, count, rate, **{"bound": FASTER_HOST, **more})


ROLLOUTS += [
    faster("135M", 256, 76938, logprobs="none", processes=2),
    faster("135M", 256, 63350, logprobs="objects", processes=2),
    faster("135M", 1024, 138607, logprobs="none", processes=2),
    faster("135M", 1024, 96331, logprobs="objects", processes=2),
    faster("135M", 256, 63804, is_server=True, processes=2),
    faster("135M", 1024, 107713, is_server=True, processes=2),
    faster("135M", 256, 60077, logprobs="none"),
    faster("135M", 256, 54404),
    faster("135M", 1024, 79729, logprobs="none"),
    faster("135M", 1024, 71335),
    faster("1.7B", 1024, 50273, logprobs="none", processes=2),
    faster("1.7B", 1024, 48583, logprobs="objects", processes=2),
    faster("1.7B", 1024, 46597, is_server=True, processes=2),
    # Another host: four processes take turns on the GPU, which the estimate does not count.
    faster("135M", 1024, 81416, logprobs="none", processes=4, bound=1.3),
    faster("135M", 1024, 89770, logprobs="objects", processes=4),
    faster("135M", 1024, 94577, is_server=True, processes=4),
    # A host of 16 cores, with vLLM's scheduler answered at once; its speed changed while it was measured.
    faster("135M", 256, 70238, logprobs="none", processes=2),
    faster("135M", 256, 43402, logprobs="objects", processes=2),
    faster("135M", 1024, 110206, logprobs="none", processes=2),
    faster("135M", 1024, 74257, logprobs="objects", processes=2),
    faster("135M", 256, 50229, is_server=True, processes=2),
    faster("135M", 1024, 91290, is_server=True, processes=2),
    faster("135M", 1024, 96059, is_server=True, processes=4),
    faster("135M", 256, 59053, logprobs="none"),
    faster("135M", 256, 54317),
    faster("135M", 1024, 60878),
]


STEPS: list[tuple[str, str, str, float, str, dict[str, float]]] = [
    # Its training was of older kernels.
    ("1.7B", "d1", "d1", 0.5, "none", {"rollout": 8.181, "weight sync, state to the host": 0.926}),
    # benchmarks/results/h200-start-up.txt
    (
        "1.7B", "d1", "d1", 0.6, "none",
        {"rollout": 8.855, "training, state back from the host": 5.334, "weight sync, state to the host": 0.679,
         "step": 15.08},
    ),
    # Its host was busy, which its rollout shows (docs/plan.md).
    (
        "8B", "t2", "d1t2", 0.6, "full",
        {"rollout": 12.148, "training, state back from the host": 16.09, "weight sync, state to the host": 1.6,
         "step": 30.154},
    ),
    (
        "8B", "d2t2", "d2t2", 0.6, "full",
        {"rollout": 8.126, "training, state back from the host": 7.496, "weight sync, state to the host": 1.681,
         "step": 17.503},
    ),
]  # fmt: skip
"""Model, layout, the engine's, its share of the memory, recomputation, seconds (h200-x4-engines.txt, h200-x2-runs.txt,
h200-x4-runs.txt)."""


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


def spec_of(model: str) -> ModelSpec:
    return spec_from_config(MODELS[model])


def layout_of(row: Update) -> ParallelLayout:
    return ParallelLayout.parse(with_backend(row.layout))


def sharded(row: Update) -> tuple[Sharded, Batch, Cluster]:
    layout = layout_of(row)
    mean = row.tokens / row.samples
    model = Sharded(spec_of(row.model), layout, PipelineSplit.of(dict(row.pipeline)), row.recompute, row.budget)
    return model, Batch(row.tokens, mean, mean * (1 + row.spread**2 / 3), row.predicted), Cluster(GPU, layout.world_size)


def second_chunk(model: Sharded) -> float:
    """GiB of the second chunk of an older head."""
    logits = 4 * model.tokens_per_micro_batch / model.layout.tp / model.layout.cp * model.spec.padded_vocab
    return min(max(0.0, logits - LOGITS_BYTES), LOGITS_BYTES) / 2**30


def updates(rows: Sequence[Rate]) -> Iterator[Tally]:
    times, sizes = Tally("step time", STEP_BOUND), Tally("memory", MEMORY_BOUND)
    print(f"{'update':<48}{'seconds':>9}{'predicted':>11}{'':>9}{'GiB':>8}{'predicted':>11}")
    for row in UPDATES:
        model, batch, cluster = sharded(row)
        estimate = update_time(model, batch, cluster, Efficiencies(rows, GPU, row.has_flash), 1.0)
        if row.micro_batches != estimate.micro_batches:
            print(f"    {row.micro_batches} micro-batches were recorded, {estimate.micro_batches} are expected")
        what = f"{row.model} {row.layout}" + (" full recomputation" if row.recompute == "full" else "")
        what += "" if row.has_flash else ", torch's attention"
        # What the micro-batches really held, which is less than the budget.
        held = replace(model, tokens_per_micro_batch=int(estimate.micro_batch_tokens))
        gib = estimate_memory(held, dtype="bfloat16", engine_sequences=0, max_sequence_tokens=1).total / 2**30
        gib += second_chunk(held) if row.older_head else 0.0
        line = f"{what:<48}{row.seconds:>9.3f}{estimate.total:>11.3f}{times.compare(estimate.total, row.seconds):>9}"
        print(f"{line}{row.gib:>8.2f}{gib:>11.2f}{sizes.compare(gib, row.gib):>9}")
    yield from (times, sizes)


def rollouts(rates: Efficiencies) -> Iterator[Tally]:
    tally = Tally("rollout tokens a second", STEP_BOUND)
    print(f"\n{'rollout':<50}{'tokens/s':>16}{'predicted':>11}")
    for row in ROLLOUTS:
        rate = row.predicted(rates)
        shown = f"{row.tokens_per_second:,}" + (f"-{row.at_most:,}" if row.at_most else "")
        print(f"{row.name:<50}{shown:>16}{rate:>11,.0f}{tally.compare(rate, row.measured(rate)):>9}")
    yield tally


def whole_steps(rates: Efficiencies) -> Iterator[Tally]:
    """GRPO steps from the command line: 256 responses of 1024 tokens, everything offloaded; the fastest after the first."""
    tally = Tally("parts of a whole step", STEP_BOUND)
    print(f"\n{'whole GRPO step':<42}{'seconds':>9}{'predicted':>11}")
    for model, layout, engine, fraction, recompute, measured in STEPS:
        policy = {"backend": f"megatron:{layout}", "tokens_per_micro_batch": BUDGET, "recompute": recompute}
        config = RunConfig.of(
            model={"path": "here"},
            policy={**policy, "offload": {"parameters": True, "gradients": True, "optimizer": True}},
            engine={"backend": f"vllm:{engine}", "memory_fraction": fraction},
            algorithm={"group_size": 8, "kl": {"coef": 0}},
            data={"train": ["x"], "prompts_per_step": 32, "max_prompt_tokens": 64, "max_response_tokens": 1024},
            launch={"gpu": GPU},
        )
        estimate = step_estimate(config, spec_of(model), Cluster(GPU, config.layout.world_size), rates, Lengths(7, 1024))
        rollout, moved, sync = (estimate.parts[name] for name in ("rollout", "offload", "weight sync"))
        parts = {
            "rollout": rollout,
            "training, state back from the host": estimate.seconds - rollout - sync - moved / 2,
            "weight sync, state to the host": sync + moved / 2,
            "step": estimate.seconds,
        }
        for name, seconds in measured.items():
            what = f"{model} {layout}, {name}"
            print(f"{what:<42}{seconds:>9.3f}{parts[name]:>11.3f}{tally.compare(parts[name], seconds):>9}")
    yield tally


@dataclass(frozen=True)
class Place:
    """Where the prediction puts the layout that was measured best."""

    model: str
    world: int
    best: Update
    measured: list[str]
    """Layouts that were measured, in the predicted order."""
    fitting: list[str]
    """All that fit the GPUs, in the predicted order; of most no one knows what they take."""

    def number(self, order: list[str]) -> int:
        return order.index(str(ParallelLayout.parse(f"megatron:{self.best.layout}"))) + 1


def places(rates: Efficiencies) -> Iterator[Place]:
    """For each model and number of GPUs of which several layouts were measured, all with the same batch."""
    groups: dict[tuple[str, int], list[Update]] = {}
    for row in UPDATES:
        if row.recompute == "none" and row.has_flash:
            world = layout_of(row).world_size
            groups.setdefault((row.model, world), []).append(row)
    for (name, world), rows in groups.items():
        if world == 1 or len(rows) < 2:
            continue
        best = min(rows, key=lambda row: row.seconds)
        model, batch, cluster = sharded(best)
        data = {"train": ["x"], "prompts_per_step": best.samples // 2}
        base = RunConfig.of(model={"path": "here"}, data=data, algorithm={"group_size": 2})
        timed = []
        for layout, split in Space(model.spec, base, cluster, rates, Lengths(256, 256)).layouts(world):
            other = replace(model, layout=layout, stages=split)
            if max(sum(vars(held).values()) for held in other.held(2)) <= cluster.bytes:
                timed.append((update_time(other, batch, cluster, rates, 1.0).total, str(layout)))
        order = [layout for _, layout in sorted(timed)]
        measured = {str(sharded(row)[0].layout) for row in rows}
        yield Place(name, world, best, [layout for layout in order if layout in measured], order)


def ranks(rates: Efficiencies) -> None:
    print("\nlayouts by predicted time, the measured best first")
    for place in places(rates):
        first = ", ".join(one.removeprefix("megatron:") for one in place.fitting[:3])
        print(
            f"{place.model}, {place.world} GPUs: {place.best.layout} is number {place.number(place.measured)} of the "
            f"{len(place.measured)} measured and {place.number(place.fitting)} of the {len(place.fitting)} that fit "
            f"(first {first})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=Path, help="rates of `fivefold plan --calibrate` instead of those that came")
    calibration = parser.parse_args().calibration
    rows = MEASURED if calibration is None else load_rates(calibration)
    rates = Efficiencies(rows, GPU)
    tallies = [*updates(rows), *rollouts(rates), *whole_steps(rates)]
    ranks(rates)
    print()
    for tally in tallies:
        tally.say()


if __name__ == "__main__":
    main()
