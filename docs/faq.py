"""Writes the table of docs/faq.md: how many GPUs a model needs, as `fivefold plan` finds them."""

from __future__ import annotations

from fivefold.config import RunConfig
from fivefold.models.families import spec_from_config
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.estimate import Lengths
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED
from fivefold.plan.search import Candidate, Space
from tests.support.public_shapes import SHAPES

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")
GPUS = ("rtx4090-24g", "h100-80g", "h200-141g")
WAYS = {"all weights": {}, "LoRA, rank 32": {"lora": {"rank": 32}}}
"""What learns -> keys of `policy`."""


def gpus_table() -> str:
    """Return the table: model, what learns, and for each kind of GPU the fewest that fit."""
    lines = [f"| model | learns | {' | '.join(f'`{gpu}`' for gpu in GPUS)} |", f"|---|---|{'---|' * len(GPUS)}"]
    for model in MODELS:
        for way, policy in WAYS.items():
            cells = [_cell(fewest(model, policy, gpu)) for gpu in GPUS]
            lines.append(f"| {model} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fewest(model: str, policy: dict[str, object], gpu: str) -> Candidate | None:
    """Return the fastest run with the fewest GPUs, with every other key at its default."""
    config = RunConfig.from_tree({"model": {"path": model}, "policy": policy, "launch": {"gpu": gpu}})
    space = Space(
        spec_from_config(SHAPES[model]), config, Cluster(gpu, 1, 1), Efficiencies(MEASURED, gpu), Lengths.of(config.data)
    )
    return space.fewest()


def _cell(candidate: Candidate | None) -> str:
    if candidate is None:
        return "more than 64"
    backend, engine = candidate.config.policy.backend, candidate.config.engine
    gpus = candidate.config.layout.world_size + (engine.layout.world_size if engine.is_apart else 0)
    return f"{gpus}: {backend.partition(':')[2]}, {candidate.estimate.seconds:.0f} s"
