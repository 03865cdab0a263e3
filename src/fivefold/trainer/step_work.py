"""Training data of a step, and how much of the step is done.

A run that ends between two optimizer steps of a step saves this in its checkpoint. It resumes with the next optimizer step,
on any layout, from the same samples.

work/step.safetensors  the stats, reports, metrics and rows so far    work/replica-00000.safetensors  a replica's batch
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.distributed.ranks import Ranks
from fivefold.files import writing
from fivefold.rollout.stats import BatchPlan, owners
from fivefold.types import RolloutStats, Scoring, StepReport, TokenBatch, Turns

WORK = "work"
"""Name of this part of a checkpoint."""
_STEP, _REPLICA = "step.safetensors", "replica-"
_SAMPLED, _TURNS = "sampled.", "turns."
_ROWS = "rows.json"
"""Name of a tensor that holds the rows as bytes."""


@dataclass
class StepWork:
    """A step that is sampled, with everything that its loss needs."""

    stats: RolloutStats
    batch: TokenBatch
    """Tokens of this replica."""
    rows: list[dict[str, Any]]
    """Rows for samples.jsonl; those of the main rank are written."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics recorded before the run ended; empty unless the step was resumed."""
    reports: dict[str, list[StepReport]] = field(default_factory=lambda: defaultdict(list))
    """Reports of the optimizer steps taken, by the role of the model."""

    @property
    def updates(self) -> int:
        """Number of optimizer steps taken, over all models."""
        return sum(len(reports) for reports in self.reports.values())

    def writer(self, ranks: Ranks, metrics: dict[str, float]) -> Callable[[Path], list[Path]]:
        """Return a function that writes this rank's share into a directory and returns its files; `metrics` are the step's
        so far."""

        def write(directory: Path) -> list[Path]:
            files = []
            if ranks.replica.rank() == 0:
                files.append(directory / f"{_REPLICA}{ranks.coords.dp:05d}.safetensors")
                self.batch.save(files[-1])
            if ranks.is_main:
                tensors, numbers = _taken_apart(self.stats)
                described = {
                    "stats": numbers,
                    "reports": {name: [asdict(report) for report in reports] for name, reports in self.reports.items()},
                    "metrics": metrics,
                }
                # Rows may exceed the size limit of a file's metadata.
                rows = json.dumps(self.rows).encode()
                tensors[_ROWS] = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
                files.append(directory / _STEP)
                with writing(files[-1]):
                    save_file(tensors, files[-1], metadata={"described": json.dumps(described)})
            return files

        return write


def read_work(directory: Path, ranks: Ranks, plan: BatchPlan) -> StepWork:
    """Read the files that ranks of any layout wrote, and deal the samples to the replicas of this layout."""
    with safe_open(directory / _STEP, framework="pt") as file:
        described = json.loads(file.metadata()["described"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rows = json.loads(tensors.pop(_ROWS).numpy().tobytes()) if _ROWS in tensors else described["rows"]
    stats = _put_together(tensors, described["stats"])
    stats = replace(stats, owner_N=owners(stats, ranks.layout.dp, plan))
    reports = defaultdict(list, {name: [StepReport(**one) for one in taken] for name, taken in described["reports"].items()})
    return StepWork(
        stats,
        _read_batch(directory, stats, (stats.owner_N == ranks.coords.dp).nonzero()[:, 0].tolist(), plan),
        rows,
        described["metrics"],
        reports,
    )


def _read_batch(directory: Path, stats: RolloutStats, rows: list[int], plan: BatchPlan) -> TokenBatch:
    """Read the samples of these stats rows from the files of all replicas."""
    wanted = set(rows)
    pieces: dict[str, dict[int, Tensor]] = {}
    nothing: dict[str, Tensor] = {}
    # Checkpoints of earlier versions lack these numbers; the run's values apply.
    numbers: dict[str, Any] = {"temperature": plan.temperature, "samples_per_comparison": plan.samples_per_comparison}
    for path in sorted(directory.glob(f"{_REPLICA}*")):
        with safe_open(path, framework="pt") as file:
            lengths_N, index_N = (file.get_tensor(name).tolist() for name in ("lengths_N", "sample_index_N"))
            names = set(file.keys()) - {"lengths_N", "sample_index_N"}
            numbers |= json.loads((file.metadata() or {}).get("numbers", "{}"))
            ends = torch.tensor(lengths_N, dtype=torch.long).cumsum(0).tolist()
            for name in names:
                numbers_T = file.get_slice(name)
                nothing[name] = numbers_T[0:0]
                for row, length, end in zip(index_N, lengths_N, ends, strict=True):
                    if row in wanted:
                        pieces.setdefault(name, {})[row] = numbers_T[end - length : end]
    tensors = {name: torch.cat([pieces[name][row] for row in rows]) if rows else nothing[name] for name in nothing}
    held = TokenBatch.fields_of(tensors)
    return TokenBatch(lengths_N=stats.lengths_N[rows].tolist(), sample_index_N=rows, **held, **numbers)


def _taken_apart(stats: RolloutStats) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, other fields) by name, with those of `scoring` among them.

    Tensors of the nested `sampled` stats and of `turns` get a prefix.
    """
    all_fields = {item.name: getattr(stats, item.name) for item in fields(stats) if item.name != "scoring"}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, value in (all_fields | vars(stats.scoring)).items():
        if isinstance(value, RolloutStats):
            inner, numbers[_SAMPLED] = _taken_apart(value)
            tensors |= {_SAMPLED + key: tensor for key, tensor in inner.items()}
        elif isinstance(value, Turns):
            tensors |= {_TURNS + key: tensor.contiguous() for key, tensor in vars(value).items()}
        elif isinstance(value, Tensor):
            tensors[name] = value.contiguous()
        elif value is not None:
            numbers[name] = value
    return tensors, numbers


def _put_together(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> RolloutStats:
    values: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if not name.startswith((_SAMPLED, _TURNS))}
    if turns := {name.removeprefix(_TURNS): tensor for name, tensor in tensors.items() if name.startswith(_TURNS)}:
        values["turns"] = Turns(**turns)
    values |= {name: value for name, value in numbers.items() if name != _SAMPLED}
    if _SAMPLED in numbers:
        inner = {name.removeprefix(_SAMPLED): tensor for name, tensor in tensors.items() if name.startswith(_SAMPLED)}
        values["sampled"] = _put_together(inner, numbers[_SAMPLED])
    values["scoring"] = Scoring(**{item.name: values.pop(item.name) for item in fields(Scoring) if item.name in values})
    return RolloutStats(**values)
