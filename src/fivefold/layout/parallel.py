"""Layout strings (`megatron:d2t2p2`) and what they mean: str -> ParallelLayout -> Coordinates of a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

BACKENDS = ("megatron",)
_DIMENSIONS = {"d": "dp", "t": "tp", "p": "pp"}


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits in a layout."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of one model."""

    backend: str = "megatron"
    dp: int = 1
    tp: int = 1
    pp: int = 1

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Read `backend:d?t?p?`; the order is free, a dimension left out is 1.

        Raises ValueError for an unknown backend or dimension, a repeated one, or a size below 1.
        """
        compact = "".join(text.split()).strip("'\"")
        example = "write for example 'megatron:d2t2p1'"
        backend, colon, sizes = compact.partition(":")
        if not colon:
            raise ValueError(f"a layout names its backend before a colon: got {text!r}; {example}")
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r} in layout {text!r}; known: {', '.join(BACKENDS)}; {example}")
        if not sizes:
            raise ValueError(f"layout {text!r} names no dimension; {example}")
        found: dict[str, int] = {}
        position = 0
        for match in re.finditer(r"([a-zA-Z])(\d+)", sizes):
            letter, number = match.groups()
            if match.start() != position:
                break
            if letter not in _DIMENSIONS:
                known = ", ".join(f"{key} ({name})" for key, name in _DIMENSIONS.items())
                raise ValueError(f"unknown dimension {letter!r} in layout {text!r}; valid: {known}")
            name = _DIMENSIONS[letter]
            if name in found:
                raise ValueError(f"dimension {letter!r} is given twice in layout {text!r}: keep one")
            if number.startswith("0"):
                raise ValueError(f"dimension sizes start at 1 and have no leading zero: got {letter}{number} in {text!r}")
            found[name] = int(number)
            position = match.end()
        if position != len(sizes):
            raise ValueError(
                f"cannot read {sizes[position:]!r} in layout {text!r}: expected a letter of "
                f"{'/'.join(_DIMENSIONS)} and a number; {example}"
            )
        return cls(backend=backend, **found)

    def __str__(self) -> str:
        return f"{self.backend}:d{self.dp}t{self.tp}p{self.pp}"

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def replica_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`, in Megatron-Core's order: tensor fastest, then data, then pipeline."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}) for layout {self}: got {rank}")
        return Coordinates(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def describe_ranks(self) -> list[str]:
        """One line a rank: `rank 3: dp 1 tp 1 pp 0`."""
        return [
            f"rank {rank}: dp {c.dp} tp {c.tp} pp {c.pp}"
            for rank in range(self.world_size)
            for c in [self.coordinates(rank)]
        ]
