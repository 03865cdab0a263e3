"""Reads checkpoints of either trainer: tensors by the names in the model's files, or by Megatron-Core's.

`fsdp:` layouts store the tensors of the files, `megatron:` layouts those of Megatron-Core. The table of the family says
which rows of the one are which rows of the other, so a run may change its trainer when it resumes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fivefold.backend.sharded_files import Box, PieceReader, Shape
from fivefold.models.families import parameters_of
from fivefold.models.fused_names import fused_name
from fivefold.models.parameters import MappedParameter, Sharding
from fivefold.models.shapes import file_shapes
from fivefold.models.spec import ModelSpec

PREFIX = "model."
"""Start of the names of Megatron-Core's tensors in a checkpoint."""
MASTER = "param"
"""Kind of state: the float32 copy that Megatron-Core's optimizers keep of a 16-bit parameter."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Block:
    """A box of one tensor that has the same elements, in the same order, as a box of a tensor of the other trainer."""

    box: Box
    other: str
    """Name of the other tensor; "" for rows of 0 that pad a vocabulary."""
    there: Box
    """The box in the other tensor: only the last axes of both are alike, others number layers and experts."""

    def translated(self, shared: Box) -> Box:
        """Return where a part of `box` is in the other tensor."""
        alike = min(len(self.box.size), len(self.there.size))
        ahead = len(self.there.size) - alike
        moved = zip(self.box.offset[-alike:], shared.offset[-alike:], self.there.offset[ahead:], strict=True)
        offset = (*self.there.offset[:ahead], *(there + place - begin for begin, place, there in moved))
        return Box(offset, (*self.there.size[:ahead], *shared.size[-alike:]))


class CheckpointReader(PieceReader):
    """Reads tensors by the names of one trainer, whichever of them wrote the files."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        super().__init__(directory)
        self._spec = spec

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Read a box of a tensor or of its state into `values`; raises as PieceReader does."""
        stem, _, kind = name.rpartition(".")
        if kind not in (MASTER, *MOMENTS):
            stem, kind = name, ""
        if stem in self and kind in ("", MASTER):
            # The run that wrote it may have had another dtype.
            is_exact = kind == MASTER or values.dtype == torch.float32
            super().fill(self._stored_as(stem, kind) if is_exact else stem, box, values)
            return
        blocks = [] if name in self else [block for block in self._blocks[stem] if not block.other or block.other in self]
        parts = [(block, shared) for block in blocks if (shared := box & block.box) is not None]
        if sum(math.prod(shared.size) for _, shared in parts) != math.prod(box.size):
            # Either it is stored under this name, or this names what is missing.
            super().fill(name, box, values)
            return
        for block, shared in parts:
            part, there = values[shared.within(box)], block.translated(shared)
            if block.other:
                super().fill(self._stored_as(block.other, kind), there, part.view(there.size))
            else:
                part.zero_()

    def _stored_as(self, other: str, kind: str) -> str:
        """Return the name under which a kind of state is stored: the exact value of a 16-bit parameter is next to it."""
        if kind in ("", MASTER):
            kind = MASTER if f"{other}.{MASTER}" in self else ""
        return f"{other}.{kind}" if kind else other

    @cached_property
    def _blocks(self) -> dict[str, list[_Block]]:
        """The blocks of each tensor of either trainer, by its name; empty for a family without a table."""
        blocks: dict[str, list[_Block]] = defaultdict(list)
        for item in () if self._spec.stored else parameters_of(self._spec):
            for file, box, mcore, there in _equal_boxes(item, self._spec):
                blocks[mcore].append(_Block(there, file, box))
                if file:
                    blocks[file].append(_Block(box, mcore, there))
        return blocks


def _equal_boxes(item: MappedParameter, spec: ModelSpec) -> Iterator[tuple[str, Box, str, Box]]:
    """Yield the blocks of a parameter: (name in the files or "", box, name in Megatron-Core's checkpoints, box)."""
    shapes = file_shapes(spec, item)
    for mcore, index in _stored_names(item, spec):
        for number, first, rows, begin in _row_ranges(item, spec, [0 if shape is None else shape[0] for shape in shapes]):
            width = (shapes[min(number, len(shapes) - 1)] or ())[1:]
            zeros = tuple(0 for _ in width)
            # Gate and up of experts are an axis of their own, and not one on top of the other.
            ahead = (*index, number) if item.expert is not None and len(item.hf) > 1 else index
            there = Box((*ahead, begin, *zeros), (*(1 for _ in ahead), rows, *width))
            yield item.hf[number] if number < len(item.hf) else "", Box((first, *zeros), (rows, *width)), mcore, there


def _stored_names(item: MappedParameter, spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """Yield (name, index along the axes before its own) under which Megatron-Core may store a parameter.

    Layers are one tensor if all of them are alike. Norms have the names of fused layers, but for latent attention's.
    """
    if item.layer is None:
        yield f"{PREFIX}{item.mcore}", ()
        return
    rest, index = item.mcore.removeprefix(f"decoder.layers.{item.layer}."), Shape()
    if item.expert is not None:
        rest, index = rest.replace(f".{item.expert}.", "."), (item.expert,)
    for name in dict.fromkeys((rest, fused_name(rest, spec, item.layer))):
        yield f"{PREFIX}decoder.layers.{item.layer}.{name}", index
        yield f"{PREFIX}decoder.layers.{name}", (item.layer, *index)


def _row_ranges(item: MappedParameter, spec: ModelSpec, counts: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number of the tensor in the files, first row, rows, first row in Megatron-Core) of each block of rows.

    `counts` are the rows of the tensors; the number after the last one stands for padding.
    """
    begin = 0
    groups = spec.kv_heads if item.sharding is Sharding.QKV else 1
    for group in range(groups):
        for number, count in enumerate(counts):
            rows = count // groups
            yield number, group * rows, rows, 0 if item.expert is not None else begin
            begin += rows
    if item.sharding is Sharding.VOCABULARY and spec.padded_vocab > begin:
        yield len(counts), 0, spec.padded_vocab - begin, begin
