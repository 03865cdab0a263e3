"""Random states of a rank. Sampling does not use them (its draws are a function of seed and position), torch does."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fivefold.distributed.ranks import Ranks


def save_rng(directory: Path, ranks: Ranks) -> None:
    """Write this rank's states."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, directory / f"{ranks.layout.world_size}-ranks-{ranks.rank}.safetensors")


def load_rng(directory: Path, ranks: Ranks) -> None:
    """Read them back; another number of ranks has none of its own and keeps the states made from the seed."""
    path = directory / f"{ranks.layout.world_size}-ranks-{ranks.rank}.safetensors"
    if not path.is_file():
        return
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
