"""Random states of a rank. Torch uses them; sampling does not, since its draws are a function of seed and position."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from fivefold.distributed.ranks import Ranks


def rng_states() -> dict[str, torch.Tensor]:
    """Return the current random states of this rank."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def rng_name(ranks: Ranks) -> str:
    """Return the name of the file with this rank's states."""
    return f"{ranks.world.size()}-ranks-{ranks.rank}.safetensors"


def load_rng(directory: Path, ranks: Ranks) -> None:
    """Load this rank's states. With another number of ranks there is no file, and the states made from the seed stay."""
    path = directory / rng_name(ranks)
    if path.is_file():
        set_rng_states(load_file(path))
