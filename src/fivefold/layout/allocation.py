"""Several layouts in one string (`sglang:d4t2+megatron:d8`): str -> Allocation."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.errors import UserError
from fivefold.layout.parallel import ParallelLayout


@dataclass(frozen=True)
class Allocation:
    """Layouts that share devices or have their own; raises ValueError if they do not fit together."""

    groups: tuple[tuple[ParallelLayout, ...], ...]
    """Groups of layouts: layouts in one group share the same ranks (`|`), groups have ranks of their own (`+`)."""

    def __post_init__(self) -> None:
        for group in self.groups:
            sizes = {layout.world_size for layout in group}
            if len(sizes) > 1:
                sizes_of_layouts = ", ".join(f"{layout} has {layout.world_size}" for layout in group)
                raise UserError(
                    f"layouts joined by | share their ranks, so their world sizes must be equal: {sizes_of_layouts}"
                )
            if unnamed := [str(layout) for layout in group[1:] if layout.name is None]:
                raise UserError(f"after a | each layout needs a name in brackets, like megatron[actor]:d4: got {unnamed[0]}")
        everyone = self.layouts
        if len(everyone) > 2 and (unnamed := [str(layout) for layout in everyone if layout.name is None]):
            raise UserError(f"with three or more layouts each needs a name in brackets: {unnamed[0]} has none")
        names = [layout.name for layout in everyone if layout.name is not None]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"each name stands for one layout: {twice[0]!r} is given twice")

    @classmethod
    def parse(cls, text: str) -> Allocation:
        """Parse layouts joined by `+` (on ranks of their own) and `|` (on the same ranks, binds tighter)."""
        return cls(tuple(tuple(ParallelLayout.parse(part) for part in _split_shared(group)) for group in _split(text, "+")))

    def __str__(self) -> str:
        return "+".join("|".join(map(str, group)) for group in self.groups)

    @property
    def layouts(self) -> list[ParallelLayout]:
        return [layout for group in self.groups for layout in group]

    @property
    def world_size(self) -> int:
        return sum(group[0].world_size for group in self.groups)


def _split(text: str, separator: str) -> list[str]:
    """Split `text` at `separator`, except within parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _split_shared(text: str) -> list[str]:
    """Split at `|`, but not between the attn and ffn parts of one layout without parentheses."""
    parts: list[str] = []
    for part in _split(text, "|"):
        if parts and "".join(part.split()).startswith("ffn:"):
            parts[-1] += "|" + part
        else:
            parts.append(part)
    return parts
