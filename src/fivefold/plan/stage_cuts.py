"""Ways to split layers into pipeline stages that are worth timing: layers, layout -> PipelineSplits. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.layout import ParallelLayout, PipelineSplit

_VIRTUAL = (1, 2, 3, 4, 6, 8)
_LIGHTER = 4
"""Largest number of layers that the last stage may have fewer than the first, because it also has the vocabulary."""


def even_split(layers: int, pp: int) -> PipelineSplit | None:
    """Return stages as even as possible, with a different first and last stage if needed; None if there is no such split."""
    if layers % pp == 0:
        return PipelineSplit()
    return next(iter(_uneven(layers, pp, lighter=1)), None)


def stage_cuts(layers: int, layout: ParallelLayout) -> list[PipelineSplit]:
    """Return even stages and stages with fewer layers at the end, with each number of virtual stages that divides them."""
    if layout.pp == 1:
        return []
    splits = [PipelineSplit()] if layers % layout.pp == 0 else []
    splits += _uneven(layers, layout.pp, _LIGHTER)
    cuts = []
    for split in splits:
        counts = {len(stage[0]) for stage in split.split_layers(layers, layout)}
        for virtual in _VIRTUAL:
            if all(count % virtual == 0 for count in counts):
                cuts.append(_virtual(split, virtual))
    return cuts


def _virtual(split: PipelineSplit, virtual: int) -> PipelineSplit:
    return PipelineSplit(
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers_in_first_pipeline_stage=split.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=split.num_layers_in_last_pipeline_stage,
    )


def _uneven(layers: int, pp: int, lighter: int) -> Iterator[PipelineSplit]:
    """Yield splits with equal middle stages; the first has as many layers or a few less.

    The last stage has as many layers as the first, or a few less.
    """
    if pp == 1:
        return
    middles = (-(-layers // pp), -(-layers // pp) + 1) if pp > 2 else (0,)
    for middle in middles:
        ends = layers - middle * (pp - 2)
        for less in range(lighter + 1):
            if ends - less < 2 or (ends - less) % 2:
                continue
            last = (ends - less) // 2
            first = ends - last
            if pp == 2 or first <= middle + 1:
                yield PipelineSplit(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
