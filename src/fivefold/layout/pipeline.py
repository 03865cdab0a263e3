"""Splits layers into pipeline stages and virtual stages: settings -> layers of each chunk. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fivefold.errors import UserError
from fivefold.layout.parallel import ParallelLayout

Chunks = tuple[tuple[tuple[int, ...], ...], ...]
"""[pipeline stage][virtual stage] -> layers, counted over the whole model."""


@dataclass(frozen=True)
class PipelineSplit:
    """Megatron-Core's settings for the pipeline split, by name."""

    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    """`Et*3|t*4|t*3L`: E embedding, t layer, L loss, | next stage."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> PipelineSplit:
        """Make the settings from the options in `policy.megatron.pipeline`."""
        return cls(**{name: options[name] for name in cls.__dataclass_fields__ if name in options})

    def virtual_stages(self, layout: ParallelLayout) -> int:
        """Return the number of virtual stages per pipeline stage."""
        if self.pipeline_model_parallel_layout is not None:
            return max(1, len(_read_layout(self.pipeline_model_parallel_layout)) // layout.pp)
        return self.virtual_pipeline_model_parallel_size or 1

    def split_layers(self, layers: int, layout: ParallelLayout) -> Chunks:
        """Return the layers of each chunk; raises ValueError if the layers cannot be split this way."""
        pp, vpp = layout.pp, self.virtual_stages(layout)
        if vpp < 1:
            raise UserError(f"virtual_pipeline_model_parallel_size must be at least 1: got {vpp}")
        if vpp > 1 and pp == 1:
            raise UserError(f"virtual stages need a pipeline: got {vpp} of them with p1 in {layout}; raise p or drop them")
        if self.pipeline_model_parallel_layout is not None:
            counts = self._counts_of_layout(layers, layout)
        else:
            counts = [_even(count, vpp, f"stage {stage}") for stage, count in enumerate(self._per_stage(layers, layout))]
            counts[0][0] -= self.account_for_embedding_in_pipeline_split
            counts[-1][-1] -= self.account_for_loss_in_pipeline_split
            if min(counts[0][0], counts[-1][-1]) < 0:
                raise UserError("the stage that counts the embedding or the loss as a layer must hold at least one")
        chunks: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
        first = 0
        for virtual in range(vpp):
            for stage in range(pp):
                chunks[stage].append(tuple(range(first, first + counts[stage][virtual])))
                first += counts[stage][virtual]
        assert first == layers
        return tuple(tuple(stage) for stage in chunks)

    def _per_stage(self, layers: int, layout: ParallelLayout) -> list[int]:
        pp = layout.pp
        ends = [(0, self.num_layers_in_first_pipeline_stage), (pp - 1, self.num_layers_in_last_pipeline_stage)]
        fixed = {stage: count for stage, count in ends if count is not None}
        extra = self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
        if fixed and pp == 1:
            raise UserError(f"num_layers_in_first/last_pipeline_stage need a pipeline: got p1 in {layout}")
        if fixed and extra:
            raise UserError(
                "num_layers_in_first/last_pipeline_stage and account_for_embedding/loss_in_pipeline_split exclude each other"
            )
        left, stages = layers + extra - sum(fixed.values()), pp - len(fixed)
        if min(fixed.values(), default=1) < 1 or left < 0 or bool(left) != bool(stages) or (stages and left % stages):
            counted = f"{layers} layers" + (f" and {extra} for embedding and loss" if extra else "")
            ends_text = f", {fixed} fixed" if fixed else ""
            raise UserError(
                f"layers must be divisible by pp: got {counted} for pp={pp} in {layout}{ends_text}; choose a p that divides "
                "them or set megatron.pipeline (num_layers_in_first_pipeline_stage, pipeline_model_parallel_layout)"
            )
        return [fixed.get(stage, left // stages if stages else 0) for stage in range(pp)]

    def _counts_of_layout(self, layers: int, layout: ParallelLayout) -> list[list[int]]:
        text = str(self.pipeline_model_parallel_layout)
        if self != PipelineSplit(self.virtual_pipeline_model_parallel_size, pipeline_model_parallel_layout=text):
            raise UserError("pipeline_model_parallel_layout replaces the other settings of the split: drop those")
        parts = _read_layout(text)
        if len(parts) % layout.pp:
            raise UserError(
                f"pipeline_model_parallel_layout must have a multiple of p stages: got {len(parts)}, p{layout.pp}: {text!r}"
            )
        vpp = len(parts) // layout.pp
        if self.virtual_pipeline_model_parallel_size not in (None, vpp):
            raise UserError(
                f"virtual_pipeline_model_parallel_size must be the stages of pipeline_model_parallel_layout over p: "
                f"got {self.virtual_pipeline_model_parallel_size} and {len(parts)} / {layout.pp}; leave it out"
            )
        together = "".join(parts)
        if together != "E" + "t" * layers + "L":
            raise UserError(
                f"pipeline_model_parallel_layout must be E, {layers} times t and L, separated by |: got {text!r} with "
                f"{together.count('t')} times t"
            )
        return [[parts[virtual * layout.pp + stage].count("t") for virtual in range(vpp)] for stage in range(layout.pp)]


def _even(count: int, parts: int, stage: str) -> list[int]:
    if count % parts:
        raise UserError(f"layers of a stage must be divisible by the virtual stages: {stage} has {count}, got {parts}")
    return [count // parts] * parts


def _read_layout(text: str) -> list[str]:
    """Expand `Et*2|(tt|)*2L` -> one string of letters per stage."""
    expanded = text.replace(",", "").replace(" ", "")
    if not re.fullmatch(r"[EtL|()*0-9]*", expanded):
        raise UserError(f"pipeline_model_parallel_layout is made of E, t, L, |, ( ), *n and commas: got {text!r}")
    for pattern in (r"\(([EtL|*0-9]*)\)(?:\*([1-9][0-9]{0,3}))?", r"([EtL|])\*([1-9][0-9]{0,3})"):
        while match := re.search(pattern, expanded):
            expanded = expanded[: match.start()] + match[1] * int(match[2] or 1) + expanded[match.end() :]
    if re.search(r"[()*0-9]", expanded):
        raise UserError(f"cannot read pipeline_model_parallel_layout {text!r}: write for example 'Et*3|t*4|t*3L'")
    return expanded.split("|")
