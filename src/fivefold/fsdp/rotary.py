"""RoPE that depends on the length of a sequence: each packed sequence is rotated as if it were alone.

For `longrope` and `dynamic` transformers chooses the frequencies of a whole call from its largest position, and `dynamic`
keeps them for later calls. So each sequence has a call of its own, with the length that it has on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.fsdp.current import current


def depends_on_length(model: Any) -> bool:
    """Return whether a sequence's length changes how its first tokens are rotated."""
    return any(_by_length(module) for module in model.modules())


def separate(model: Any) -> None:
    """Let modules of RoPE that depends on a sequence's length compute each packed sequence by itself."""
    for module in model.modules():
        if _by_length(module):
            # torch.compile would compile each length.
            module.forward = torch.compiler.disable(_apart(module.forward))


def _by_length(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None) or ""
    names = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in name or name == "longrope" for name in names)


def _apart(compute: Any) -> Any:
    def alone(hidden: Tensor, positions: Tensor, *options: Any, **named: Any) -> Any:
        # A sequence of one token clears what `dynamic` keeps of a longer one.
        compute(hidden, torch.zeros_like(positions[..., :1]), *options, **named)
        return compute(hidden, positions, *options, **named)

    def forward(x: Tensor, position_ids: Tensor, *options: Any, **named: Any) -> Any:
        now = current()
        if now is None:
            return alone(x, position_ids, *options, **named)
        sizes = [padded // now.mesh.cp.size() for padded in now.packing.lengths]
        parts = []
        for positions, length in zip(position_ids.split(sizes, -1), now.packing.real_lengths, strict=True):
            # The last token may be on another rank, and padding must not count.
            last = torch.full_like(positions[..., :1], length - 1)
            parts.append(alone(x, torch.cat([positions.clamp(max=length - 1), last], -1), *options, **named))
        # Cosines and sines, or complex numbers of both.
        if isinstance(parts[0], Tensor):
            return torch.cat([part[..., :-1, :] for part in parts], -2)
        return tuple(torch.cat([part[..., :-1, :] for part in kind], -2) for kind in zip(*parts, strict=True))

    return forward
